from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from metabridge import InputError, load
from metabridge.experiments import (
    ExperimentOptions,
    load_experiment,
    mini_imagenet_training_runs,
    recipe,
)
from metabridge.report.results import Result

RESULTS = Path(__file__).resolve().parents[2] / "results"
CASES = ("muon", "distilled", "mixup")


@pytest.fixture
def small(monkeypatch, glyphs) -> None:
    """Shorten all training runs to four steps on a few classes, and evaluate them on four tasks."""
    few_classes = replace(glyphs, splits={split: classes[:8] for split, classes in glyphs.splits.items()})
    small_options = {"model_options": {"widths": [4, 4, 8, 8]}, "batch_size": 4, "validate_tasks": 2}
    configs = {
        scale: {"rfs": replace(mini_imagenet_training_runs.configs(scale)["rfs"], **small_options)}
        for scale in ("quick", "paper")
    }
    monkeypatch.setattr(recipe, "configs", configs.get)
    monkeypatch.setattr(recipe, "STEPS", {"quick": 4, "paper": 4})
    monkeypatch.setattr(ExperimentOptions, "load_images", lambda *_, **__: few_classes)
    evaluations = mini_imagenet_training_runs.EVALUATIONS
    monkeypatch.setitem(evaluations, "quick", replace(evaluations["quick"], tasks=4))


def test_cases_are_trained_with_their_options_and_students_with_their_teacher(small, tmp_path):
    outcome = load_experiment("recipe").run(ExperimentOptions("quick", out=tmp_path, only=CASES, progress=False))
    assert set(outcome.data) == set(CASES)
    assert outcome.data["mixup"].plan["soft_targets"]["mixup"] == 0.2
    assert outcome.data["muon"].plan["soft_targets"] is None
    folders = {name: tmp_path / "runs" / f"recipe-glyphs-{name}-quick-0" for name in CASES}
    assert "teacher" in load(folders["distilled"]).settings
    assert "teacher" not in load(folders["mixup"]).settings
    recipe.EXPERIMENT.draw(outcome, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_student_without_its_teacher_raises_an_error(small, tmp_path):
    with pytest.raises(InputError, match=r"distilled needs the trained run of muon\. Add muon to --only"):
        load_experiment("recipe").run(ExperimentOptions("quick", out=tmp_path, only=("distilled",), progress=False))


def test_the_committed_result_follows_from_its_records(monkeypatch):
    monkeypatch.setattr(
        "metabridge.experiments.training_records.train_on_images", lambda *_, **__: pytest.fail("trained")
    )
    outcome = load_experiment("recipe").run(ExperimentOptions("paper", out=RESULTS, only=("muon",), progress=False))
    assert outcome.result.rows == Result.read(RESULTS / "recipe.json").rows
