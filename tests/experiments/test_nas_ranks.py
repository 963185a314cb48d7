from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metabridge import InputError
from metabridge.experiments import ExperimentOptions, Outcome, load_experiment, nas_ranks, nas_ranks_training_runs
from metabridge.experiments.nas_ranks_training_runs import (
    KERNELS,
    PROXIES,
    SETTINGS,
    RankRecord,
    ScoredArchitecture,
    score,
)
from metabridge.nas import random_architecture, score_model
from metabridge.training import evaluate
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.image_training import train_on_images
from small_searches import MACHINE, SEARCH, small_images


@pytest.fixture
def small(monkeypatch, glyphs) -> None:
    """Give the experiment small settings and small images during the test."""
    config = replace(SETTINGS["quick"].config, iterations=2, validate_every=2, validate_tasks=2, batch_size=8)
    settings = nas_ranks_training_runs.Settings(4, replace(SEARCH, cells=3), config, test_tasks=4, resamples=20)
    monkeypatch.setitem(SETTINGS, "quick", settings)
    monkeypatch.setattr(nas_ranks_training_runs, "load", lambda name: small_images(glyphs))


def run(out: Path, **options) -> Outcome:
    return load_experiment("nas-ranks").run(ExperimentOptions("quick", out=out, progress=False, **options))


def architectures(outcome: Outcome) -> tuple[ScoredArchitecture, ...]:
    (record,) = outcome.data.values()
    return record.architectures


def test_every_proxy_is_correlated_and_trained_architectures_are_stored(small, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="nas-ranks has trained 0 architectures, but needs at least 3"):
        run(tmp_path, minutes=0)
    complete = run(tmp_path)
    assert {row.name for row in complete.result.rows[:-2]} == {
        f"{proxy}, {kind}" for proxy in PROXIES for kind in ("Spearman", "Kendall")
    }
    assert all(set(entry.proxies) == set(PROXIES) for entry in architectures(complete))
    assert len({entry.architecture for entry in architectures(complete)}) == 4
    load_experiment("nas-ranks").draw(complete, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(nas_ranks_training_runs, "image_trainer", lambda *_, **__: pytest.fail("trained"))
    assert run(tmp_path).result == complete.result
    monkeypatch.setitem(SETTINGS, "quick", replace(SETTINGS["quick"], architectures=3))
    assert architectures(run(tmp_path)) == architectures(complete)[:3]


def test_an_architecture_that_is_missing_from_the_record_is_trained_even_if_later_ones_are_stored(small, tmp_path):
    complete = architectures(run(tmp_path))
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    file.write_text(json.dumps({**record, "judged": record["judged"][1:]}))  # without the first architecture
    assert {entry.architecture for entry in architectures(run(tmp_path))} == {entry.architecture for entry in complete}


def test_records_of_older_versions_are_read(small, tmp_path):
    complete = run(tmp_path)
    (file,) = (tmp_path / "records").iterdir()
    record = json.loads(file.read_text())
    assert list(record) == ["name", "plan", "environment", "judged"]  # "judged" holds the architectures
    training = record["plan"]["training"]
    # older versions had another name for the batch size, and no such options as the two that are deleted
    training["batch"] = training.pop("batch_size")
    del training["ema_decay"], training["soft_targets"]
    file.write_text(json.dumps(record))
    assert run(tmp_path).result == complete.result


def test_failed_proxies_rank_last():
    architecture = random_architecture(torch.Generator().manual_seed(0))

    def predicted_quality(proxy: str, value: float | None) -> float:
        return ScoredArchitecture(architecture, {proxy: value}, 0.5, 0.1, 1.0).predicted_quality(proxy)

    assert predicted_quality("NTK", None) < predicted_quality("NTK", 1e9) < predicted_quality("NTK", 2.0)
    assert (
        predicted_quality("parameters", None)
        < predicted_quality("parameters", 2.0)
        < predicted_quality("parameters", 1e9)
    )


def test_proxies_are_means_over_repeats_and_accuracies_are_means_over_test_tasks(glyphs, tmp_path):
    images = small_images(glyphs)
    config = ImageTrainingConfig("mtl", batch_size=1, iterations=1, validate_every=1, validate_tasks=2)
    trained_run = train_on_images(config, images, progress=False)
    architecture = random_architecture(torch.Generator().manual_seed(0))
    search = replace(SEARCH, cells=3, tasks=2, repeats=2)
    settings = replace(SETTINGS["quick"], search=search, test_tasks=20)
    result = score(ExperimentOptions("quick"), settings, architecture, trained_run, images)
    file = str(architecture.save(tmp_path / "architecture.json"))
    for proxy, kernel in {**KERNELS, "linear regions": "none"}.items():
        expected = score_model(file, images, replace(search, kernel=kernel)).mean.value
        assert result.proxies[proxy] == pytest.approx(expected, rel=1e-5)
    validation, test = (
        evaluate(trained_run, images.tasks(split), tasks=20, seed=0) for split in ("validation", "test")
    )
    assert result.accuracy == test.mean != validation.mean


def test_rows_contain_half_the_width_of_the_interval():
    generator = torch.Generator().manual_seed(0)
    scored_architectures = tuple(
        ScoredArchitecture(random_architecture(generator), dict.fromkeys(PROXIES, float(index)), accuracy, 0.1, 1.0)
        for index, accuracy in enumerate((0.5, 0.4, 0.7, 0.6))
    )
    record = RankRecord("", {}, MACHINE, 4.0, scored_architectures)
    rows = {row.name: row for row in nas_ranks.rows({"": record}, ExperimentOptions("quick"))}
    resamples = SETTINGS["quick"].resamples
    correlations = nas_ranks.correlations(scored_architectures, "Spearman", resamples=resamples, seed=0)
    for proxy, interval in correlations.items():
        assert interval.low < interval.value < interval.high
        assert rows[f"{proxy}, Spearman"].ours == interval.value
        assert rows[f"{proxy}, Spearman"].ci95 == pytest.approx((interval.high - interval.low) / 2)
