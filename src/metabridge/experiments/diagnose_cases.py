"""Diagnoses of tasks with hard and easy alphabets, and training runs on such tasks, for `diagnose_images`.

The training runs compare MAML with non-adaptive learning (NAL). r_H is the dispersion of the solutions of hard tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from metabridge.diagnosis import Diagnosis, Interval, diagnose, untrained_network
from metabridge.diagnosis.feature_space import mean_rates
from metabridge.environments import LabeledImages
from metabridge.environments.image_splits import superclass_tasks, tasks_by_superclass
from metabridge.environments.mixture import Mixture
from metabridge.experiments.experiment import ExperimentOptions
from metabridge.experiments.landscape_table1 import QUERIES, SIMILAR_ALPHABETS, WAYS
from metabridge.experiments.landscape_training_runs import AccuracyRecord, Conv4Training, PlannedRun, train_all

# The number of hard alphabets, as in Collins et al. (2022). Gradient descent converges most slowly on their tasks.
HARD_ALPHABETS = 10
# The settings of r_H with their labels in figures. Hard tasks from more alphabets have a larger r_H.
R_H = {"small": "hard tasks from 2 alphabets", "large": f"hard tasks from {HARD_ALPHABETS} alphabets"}
LEARNERS = ("nal", "maml")
RUN_NAMES = tuple(f"{setting}-{learner}" for setting in R_H for learner in LEARNERS)


@dataclass(frozen=True)
class Case:
    """The diagnoses and training runs for one data set and one seed.

    Args:
        data: Name of the data set.
        seed: Seed of the untrained network, of the tasks and of the training runs.
        hard_alphabets: Names of the hard alphabets, by setting of r_H.
        easy_alphabets: Names of the easy alphabets, which are the same in both settings.
        diagnoses: The diagnoses, by setting of r_H.
        records: Records of the finished training runs, by setting of r_H and learner.
    """

    data: str
    seed: int
    hard_alphabets: Mapping[str, Sequence[str]]
    easy_alphabets: Sequence[str]
    diagnoses: Mapping[str, Diagnosis]
    records: Mapping[tuple[str, str], AccuracyRecord] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in the settings and in the figure."""
        return f"{self.data}, seed {self.seed}"

    def gain(self, setting: str) -> Interval | None:
        """Return the accuracy of MAML minus that of NAL on hard test tasks, in percentage points.

        Return None if one of the two is not trained.
        """
        if not all((setting, learner) in self.records for learner in LEARNERS):
            return None
        nal, maml = (self.records[setting, learner].scores["hard test"] for learner in LEARNERS)
        return Interval.symmetric(100 * (maml.mean - nal.mean), 100 * math.hypot(maml.ci95, nal.ci95))


def diagnose_case(data: str, images: LabeledImages, *, tasks: int, ranking_tasks: int, seed: int) -> Case:
    """Rank the alphabets by convergence rate on an untrained network, and diagnose tasks in both settings of r_H.

    Args:
        data: Name of the data set.
        images: The images.
        tasks: Number of tasks per diagnosis.
        ranking_tasks: Number of tasks per alphabet, to rank the alphabets.
        seed: Seed of the untrained network and of the tasks.

    Returns:
        The case, without training runs.
    """
    environments = tasks_by_superclass(images, ways=WAYS, queries=QUERIES)
    space, rates = mean_rates(environments, untrained_network(images, seed=seed), tasks=ranking_tasks, seed=seed)
    hardest = sorted(rates, key=rates.__getitem__)[:HARD_ALPHABETS]
    # the hard alphabets for small r_H: two similar alphabets of Omniglot, or else the two on which learning is slowest
    similar = list(SIMILAR_ALPHABETS) if set(SIMILAR_ALPHABETS) <= set(rates) else hardest[:2]
    hard = {"small": similar, "large": hardest}
    easy = [name for name in rates if name not in (*similar, *hardest)]
    diagnoses = {
        setting: diagnose(
            hard_and_easy_tasks(images, hard[setting], easy),
            features=space.coordinates,
            groups="parts",  # the first part of the mixture is hard, the second easy
            tasks=tasks,
            seed=seed,
        )
        for setting in R_H
    }
    return Case(data, seed, hard, easy, diagnoses)


def hard_and_easy_tasks(images: LabeledImages, hard: Sequence[str], easy: Sequence[str]) -> Mixture:
    """Return a mixture of hard tasks, each with classes of one hard alphabet, and easy tasks across easy alphabets."""
    hard_tasks = superclass_tasks(images, hard, superclass="same", ways=WAYS, queries=QUERIES)
    easy_tasks = superclass_tasks(images, easy, superclass="different", ways=WAYS, queries=QUERIES)
    return Mixture((hard_tasks, easy_tasks), (0.5, 0.5))


def train_case(
    options: ExperimentOptions, experiment: str, training: Conv4Training, case: Case, images: LabeledImages
) -> Case:
    """Train on every second alphabet of each setting, test on the others, and return the case with the records."""
    planned = {}
    for setting in R_H:
        train, test = (
            hard_and_easy_tasks(images, case.hard_alphabets[setting][i::2], case.easy_alphabets[i::2]) for i in (0, 1)
        )
        test_environments = dict(zip(("hard test", "easy test"), test.environments))
        description = {
            "hard": case.hard_alphabets[setting],
            "easy": case.easy_alphabets,
            "ways": WAYS,
            "shots": 1,
            "queries": QUERIES,
        }
        for learner in LEARNERS:
            run_training = replace(training, method=learner, seed=case.seed)
            planned[setting, learner] = PlannedRun(
                f"{setting}-{learner}", run_training, train, test_environments, description
            )
    records = train_all(options, experiment, images, list(planned.values()))
    return replace(case, records={key: record for key, record in zip(planned, records) if record is not None})
