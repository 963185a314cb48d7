from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from metabridge import InputError
from metabridge.experiments import ExperimentOptions, training_records
from metabridge.training import TestTimeAugmentation, head_selection
from metabridge.training.config import ImageTrainingConfig
from metabridge.training.evaluation import Score
from metabridge.training.head_selection import SplitAccuracy
from small_searches import make_record, small_images


class EncodingTable:
    """A replacement for `FeatureTable`. Its scores encode the arguments of `evaluate`."""

    @classmethod
    def of(cls, *_, **__) -> EncodingTable:
        return cls()

    def evaluate(self, models, environment, *, tasks, seed=0) -> list[Score]:
        code = 1000 * seed + 100 * (environment.split == "test") + 10 * environment.shots
        return [Score.of(torch.tensor([code + model.method.test_solver.penalty] * tasks)) for model in models]


def test_every_score_belongs_to_its_split_shots_penalty_and_seed(glyphs, monkeypatch, tmp_path):
    monkeypatch.setattr(head_selection, "FeatureTable", EncodingTable)
    options = ExperimentOptions("quick", out=tmp_path, seed=7, progress=False)
    config = ImageTrainingConfig("mtl", batch_size=1, iterations=1, validate_every=1, validate_tasks=2)
    images, evaluation = small_images(glyphs), training_records.Evaluation((1, 5), 2, ())
    record = training_records.train_or_load(options, "", "short-run", config, lambda: images, evaluation)
    assert {(score.split, score.shots, score.penalty): score.mean for score in record.scores} == {
        (split, shots, penalty): pytest.approx(7000 + 100 * (split == "test") + 10 * shots + penalty)
        for split in ("validation", "test")
        for shots in (1, 5)
        for penalty in training_records.PENALTIES
    }


def test_the_selected_head_is_the_best_in_validation():
    scores = (  # split, shots, accuracy, ci95, number of tasks, penalty and augmentation
        SplitAccuracy("validation", 5, 0.70, 0.01, 10, 0.1),
        SplitAccuracy("validation", 5, 0.75, 0.01, 10, 0.1, TestTimeAugmentation(5)),
        SplitAccuracy("validation", 5, 0.72, 0.01, 10, 1.0, TestTimeAugmentation(5, True)),
        SplitAccuracy("validation", 1, 0.99, 0.01, 10, 1.0, TestTimeAugmentation(5, True)),
        SplitAccuracy("test", 5, 0.60, 0.01, 10, 0.1),
        SplitAccuracy("test", 5, 0.61, 0.01, 10, 0.1, TestTimeAugmentation(5)),
        SplitAccuracy("test", 5, 0.69, 0.01, 10, 1.0, TestTimeAugmentation(5, True)),
    )
    record = replace(make_record(0.5), name="mtl", scores=scores)
    assert record.selected_accuracy(5).mean == 0.61
    assert record.score("test", 5, penalty=0.1).mean == 0.60
    with pytest.raises(InputError, match="the record of mtl has no such score on the test split with 1 shots"):
        record.selected_accuracy(1)
