from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from metabridge.experiments import ExperimentOptions, open_set
from metabridge.experiments.open_set import CENTROID, EXPERIMENT, OURS, RATES, SHOTS, SOFTMAX, THRESHOLD_SHOTS
from metabridge.training.assessment import feature_table, open_set_tasks

OPTIONS = ExperimentOptions("quick", progress=False)


@pytest.fixture(scope="module")
def images(glyphs):
    """The first 12 classes of each split, which all experiments of this file load."""
    few_classes = replace(glyphs, splits={split: classes[:12] for split, classes in glyphs.splits.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExperimentOptions, "load_images", lambda *_, **__: few_classes)
        yield few_classes


@pytest.fixture(scope="module")
def model(images):
    """A small network after a few training steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_set, "TRAINING", replace(open_set.TRAINING, model_options={"filters": 4}, batch_size=16))
        patch.setitem(open_set.SETTINGS, "quick", open_set.Settings(6, {"glyphs": 4}, 32))
        return open_set.train_model("glyphs", OPTIONS)


@pytest.fixture(scope="module")
def comparison(model, images):
    return open_set.compare_scores("glyphs", model, images, 6, OPTIONS)


def test_every_score_and_rate_has_a_row(comparison):
    rows = {(row.name, row.metric): row for row in open_set.rows([comparison], OPTIONS)}
    for shots in SHOTS:
        for name in (OURS, SOFTMAX, CENTROID):
            score = comparison.aurocs[shots, name]
            assert rows[f"glyphs, {shots}-shot, {name}", "AUROC %"].ours == 100 * score.mean
        for name in (SOFTMAX, CENTROID):
            difference = comparison.aurocs[shots, OURS].mean - comparison.aurocs[shots, name].mean
            row = rows[f"glyphs, {shots}-shot, {OURS} over {name}", "AUROC difference, points"]
            assert row.ours == pytest.approx(100 * difference)
    for shots in THRESHOLD_SHOTS:
        for rate in RATES:
            for kind in ("known", "unknown"):
                row = rows[f"glyphs, {shots}-shot, threshold for {100 * rate:g} %", f"{kind} rejected, %"]
                assert row.ours == 100 * getattr(comparison.rejections[shots, rate], f"rejected_{kind}").mean
    assert len(rows) == 5 * len(SHOTS) + 2 * len(THRESHOLD_SHOTS) * len(RATES)


def test_the_baselines_are_those_of_scikit_learn(model, images, comparison):
    environment = images.tasks("test", ways=5, shots=5, queries=open_set.QUERIES)
    values = {SOFTMAX: [], CENTROID: []}
    for episodes, unknown in open_set_tasks(feature_table(model, environment), environment, tasks=6, seed=0):
        inputs = torch.cat([episodes.support_x, episodes.query_x, unknown], 1)
        for x, labels in zip(torch.nn.functional.normalize(inputs, dim=-1).numpy(), episodes.support_y.numpy()):
            support, queries = x[:25], x[25:]
            logistic = LogisticRegression(C=1 / 0.33, tol=1e-8, max_iter=1000).fit(support, labels)
            centroids = [support[labels == label].mean(0) for label in range(5)]
            scores = {
                SOFTMAX: -logistic.predict_proba(queries).max(1),
                CENTROID: [min(((query - centroid) ** 2).sum() for centroid in centroids) for query in queries],
            }
            for name, task_scores in scores.items():
                values[name].append(roc_auc_score([0] * 50 + [1] * 50, task_scores))
    for name, aurocs in values.items():
        assert comparison.aurocs[5, name].values.tolist() == pytest.approx(aurocs, abs=1e-3)


def test_with_one_shot_the_outlier_score_ranks_like_the_distance_to_the_nearest_centroid(comparison):
    ours, centroid = (comparison.aurocs[1, name].values.tolist() for name in (OURS, CENTROID))
    assert ours == pytest.approx(centroid, abs=1e-3)


def test_data_sets_that_are_not_available_are_left_out_and_the_figure_shows_the_others(model, monkeypatch):
    monkeypatch.setattr(open_set, "train_model", lambda data, options: model)
    monkeypatch.setitem(open_set.SETTINGS, "quick", open_set.Settings(2, {"glyphs": 4}, 32))
    outcome = EXPERIMENT.run(OPTIONS)
    assert [comparison.data for comparison in outcome.data] == ["glyphs"]
    labels = [label.get_text() for label in open_set.figure(outcome).axes[0].get_yticklabels()]
    assert labels == [f"glyphs, {shots}-shot, {name}" for shots in SHOTS for name in (OURS, SOFTMAX, CENTROID)]


def test_the_paper_scale_uses_the_built_in_models(model, monkeypatch):
    loaded = []
    monkeypatch.setattr(open_set, "load_model", lambda name, device: loaded.append(name) or model)
    monkeypatch.setitem(open_set.SETTINGS, "paper", replace(open_set.SETTINGS["paper"], tasks=2))
    (comparison,) = open_set.measure(replace(OPTIONS, scale="paper"))
    assert loaded == ["characters"]
    assert comparison.aurocs[1, OURS].tasks == 2
