from __future__ import annotations

import json
from dataclasses import replace

import pytest

from metabridge.training import load
from metabridge.training.assessment import assess_open_set
from small_runs import EVALUATE


@pytest.fixture(scope="module")
def run(glyphs, tmp_path_factory):
    """The folder of a short run with fixed features."""
    from metabridge.datasets import load as load_images
    from metabridge.training.config import default_config
    from metabridge.training.image_training import train_on_images

    folder = tmp_path_factory.mktemp("runs") / "mtl"
    small_options = {"iterations": 4, "validate_every": 2, "validate_tasks": 4, "queries": 2, "batch_size": 2}
    config = replace(default_config("mtl"), **small_options, statistics="running", model_options={"filters": 6})
    train_on_images(config, load_images("glyphs"), out=folder, progress=False)
    return folder


def test_open_set_results_are_in_the_table_and_in_the_json_file(metabridge, run, glyphs, tmp_path):
    file = tmp_path / "report.json"
    status, printed, errors = metabridge("evaluate", run, "--shots", "1,2", *EVALUATE, "--open-set", "--json", file)
    assert (status, errors) == (0, "")
    one_shot, two_shots = (entry["open_set"] for entry in json.loads(file.read_text()))
    expected = assess_open_set(load(run), glyphs.tasks("test", shots=2, queries=4), tasks=10)
    assert two_shots["rate"] == 0.05
    for key in ("auroc", "rejected_known", "rejected_unknown"):
        score = getattr(expected, key)
        assert two_shots[key] == pytest.approx({"mean": score.mean, "ci95": score.ci95})
        assert str(score).removesuffix(" %") in printed
    assert one_shot["rejected_known"] is one_shot["rejected_unknown"] is None
    assert 0.5 < one_shot["auroc"]["mean"] < 1


def test_the_accuracy_on_the_most_confident_queries_is_always_in_the_json_file(metabridge, run, tmp_path):
    file = tmp_path / "report.json"
    status, printed, _ = metabridge("evaluate", run, "--shots", 1, *EVALUATE, "--json", file)
    assert status == 0
    (entry,) = json.loads(file.read_text())
    assert entry["open_set"] is None
    assert "unknown" not in printed
    assert list(entry["accuracy_at_coverage"]) == ["0.5", "0.8", "0.9"]
    assert entry["accuracy_at_coverage"]["0.5"] > entry["accuracy"]
    assert 0 < entry["risk_coverage_area"] < 1 - entry["accuracy"]


def test_a_method_that_adapts_the_features_has_no_outlier_scores(metabridge, runs):
    status, _, errors = metabridge("evaluate", runs["anil"], "--shots", 1, *EVALUATE, "--open-set")
    assert status == 2
    assert "outlier scores need features that do not depend on the task" in errors
    assert "statistics='running'" in errors or "--statistics running" in errors
