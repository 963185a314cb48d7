"""Select the penalty of a test-time head and the test-time augmentation on validation tasks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from metabridge.environments.image_tasks import LabeledImages
from metabridge.heads import Head
from metabridge.training.evaluation import NO_AUGMENTATION, FeatureTable, Model, TestTimeAugmentation, evaluate


@dataclass(frozen=True)
class SplitAccuracy:
    """The mean accuracy of a network over tasks of a split.

    Args:
        split: "validation" or "test".
        shots: Number of support images per class.
        mean: Mean over the tasks.
        ci95: Half-width of the 95 % confidence interval of the mean.
        tasks: Number of tasks.
        penalty: L2 penalty with which the head was fitted. None if the penalty of this head is not selected on
            validation tasks.
        views: Test-time augmentation; records of experiments contain it under this name.

    >>> str(SplitAccuracy("test", 5, 0.78, 0.01, 600, penalty=0.1))
    '600 test tasks; chosen in validation: penalty 0.1, plain images'
    """

    split: str
    shots: int
    mean: float
    ci95: float
    tasks: int
    penalty: float | None = None
    views: TestTimeAugmentation = NO_AUGMENTATION

    def __str__(self) -> str:
        """Describe a test accuracy: number of tasks and, if they were selected, penalty and augmentation."""
        if self.penalty is None:
            return f"{self.tasks} test tasks"
        return f"{self.tasks} test tasks; chosen in validation: penalty {self.penalty:g}, {self.views}"


@dataclass(frozen=True)
class HeadSelection:
    """Measures the accuracies that are needed to select the penalty of a head and the test-time augmentation.

    Args:
        ways: Number of classes per task.
        shots: Numbers of support images per class. Accuracies are measured for each of them.
        tasks: Number of tasks of each split.
        penalties: L2 penalties of the head to choose from without augmentation.
        augmented_penalties: L2 penalties of the head to choose from with augmentation.
        augmentations: Test-time augmentations to choose from.
        seed: Seed of the tasks.

    >>> from metabridge.datasets import load
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import conv4
    >>> mtl, net = method("mtl"), conv4(channels=1, filters=4)
    >>> model = Model(mtl, net, parameters(mtl, net, classes=5))
    >>> selection = HeadSelection(ways=5, shots=(1,), tasks=2, penalties=(0.1, 1.0))
    >>> [(score.split, score.penalty) for score in selection.scores(model, load("glyphs"))]
    [('test', 0.1), ('test', 1.0), ('validation', 0.1), ('validation', 1.0)]
    """

    ways: int
    shots: Sequence[int]
    tasks: int
    penalties: Sequence[float]
    augmented_penalties: Sequence[float] = ()
    augmentations: Sequence[TestTimeAugmentation] = ()
    seed: int = 0

    def scores(self, model: Model, images: LabeledImages) -> Iterator[SplitAccuracy]:
        """Yield the accuracies of a trained model on validation and test tasks.

        If the penalty of the head is selected, they are, for every number of shots:
        - without augmentation, the accuracies on test and on validation tasks for every penalty;
        - for every augmentation, the accuracies on validation tasks for every penalty;
        - if one of these augmentations was best in validation, the accuracy with it and its best penalty on test tasks.
        Otherwise, there is one accuracy for each split and number of shots.
        """
        if not selects_penalty(model):
            for split in ("validation", "test"):
                for shots in self.shots:
                    environment = images.tasks(split, ways=self.ways, shots=shots)
                    score = evaluate(model, environment, tasks=self.tasks, seed=self.seed)
                    yield SplitAccuracy(split, shots, score.mean, score.ci95, score.tasks)
            return
        yield from self._penalty_scores(model, images, "test", self.shots, self.penalties, NO_AUGMENTATION)
        penalties = self.penalties
        candidates = list(self._penalty_scores(model, images, "validation", self.shots, penalties, NO_AUGMENTATION))
        for augmentation in self.augmentations:
            penalties = self.augmented_penalties
            candidates += self._penalty_scores(model, images, "validation", self.shots, penalties, augmentation)
        yield from candidates
        for shots in self.shots:
            best = best_in_validation(candidates, shots)
            if best.views != NO_AUGMENTATION and best.penalty is not None:
                yield from self._penalty_scores(model, images, "test", [shots], [best.penalty], best.views)

    def _penalty_scores(
        self,
        model: Model,
        images: LabeledImages,
        split: str,
        all_shots: Sequence[int],
        penalties: Sequence[float],
        augmentation: TestTimeAugmentation,
    ) -> Iterator[SplitAccuracy]:
        """Yield the accuracy for each number of shots and each penalty.

        Features are computed only once, since they depend on neither shots nor penalty.
        """
        models = [_with_penalty(model, penalty) for penalty in penalties]
        environments = {shots: images.tasks(split, ways=self.ways, shots=shots) for shots in all_shots}
        table = FeatureTable.of(model, environments[all_shots[0]], augmentation, seed=self.seed)
        for shots, environment in environments.items():
            scores = table.evaluate(models, environment, tasks=self.tasks, seed=self.seed)
            for penalty, score in zip(penalties, scores):
                yield SplitAccuracy(split, shots, score.mean, score.ci95, score.tasks, penalty, augmentation)

    def fitting_seconds(self, model: Model, images: LabeledImages) -> float | None:
        """Return the seconds needed to fit the head to all test tasks; None if its penalty is not selected."""
        if not selects_penalty(model):
            return None
        environments = [images.tasks("test", ways=self.ways, shots=shots) for shots in self.shots]
        table = FeatureTable.of(model, environments[0])
        start_time = time.perf_counter()
        for environment in environments:
            # the scores are copied to the CPU, which waits for the GPU, so its work is included in the time
            table.evaluate([model], environment, tasks=self.tasks)
        return time.perf_counter() - start_time


def best_in_validation(scores: Iterable[SplitAccuracy], shots: int) -> SplitAccuracy:
    """Return the best validation accuracy with this number of shots.

    >>> scores = [SplitAccuracy("validation", 5, penalty, 0.01, 600, penalty) for penalty in (0.1, 0.7)]
    >>> best_in_validation(scores, shots=5).penalty
    0.7
    """
    return max(
        (score for score in scores if score.split == "validation" and score.shots == shots),
        key=lambda score: score.mean,
    )


def selects_penalty(model: Model) -> bool:
    """Return whether the penalty of the model's head is selected on validation tasks.

    It is selected for heads that have a penalty and whose outputs estimate probabilities (`Head.calibrated`), such as
    logistic regression. The penalties of R2D2 and MetaOptNet are also used in training, so they are not selected
    afterwards.
    """
    head = model.method.test_solver
    return isinstance(head, Head) and head.calibrated and head.default_penalty is not None


def _with_penalty(model: Model, penalty: float) -> Model:
    head: Any = model.method.test_solver
    return replace(model, method=replace(model.method, test_solver=replace(head, penalty=penalty)))
