"""Kernels as few-shot classifiers: what MTL, ANIL and MAML gain at infinite width, beside trained nets.

There is no published number to meet. The twins of wide nets learn one-hot labels, and those have no meaning beyond a
task: another gives the first output to another class. At infinite width an output learns from the same output of other
tasks alone, so that over all labellings of the training tasks nothing is left to learn. Nets of finite width share
features between outputs, and learn those. What to look for: what the kernels gain over regression on the support by
itself, with few and with many training tasks; what nets gain; and a control in which outputs mean the same in every
task, whose labels go by the share of ink in the upper half.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, layer_norm

from metabridge.datasets import load
from metabridge.environments.image_tasks import ImageTasks, LabelledImages, TaskIndices
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work, environment
from metabridge.kernels import AnalyticKernel, Kernel, KernelLearner, conv4_kernel, fully_connected_kernel
from metabridge.kernels.kernel_predictors import FittedKernelLearner, KernelMethod
from metabridge.training import Score, evaluate
from metabridge.training.config import Plan

ID = "kernel-fewshot"
SIZE = 16  # pixels, the fewest that conv4's kernel takes: its cost grows with the fourth power
KERNELS: dict[str, AnalyticKernel] = {"fully connected": fully_connected_kernel(depth=3), "conv4": conv4_kernel()}
TWINS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")
ALONE: dict[str, KernelMethod] = {
    "NNGP": "anil-split",
    "NTK": "maml",
}  # trained for no time, only their inner loop is left
INNER_TIMES, RIDGES = (10.0, math.inf), (0.01, 1.0, 100.0)  # where the mean of Θ's diagonal is 1
ANIL_TIME = 1.0  # in training
UNTRAINED, FRESH = "support alone", "fresh tasks"  # what learners learnt from
QUERIES = {1: 2, 5: 1}  # of each class in the kernels' training tasks, by shots


@dataclass(frozen=True)
class Pool:
    """How many classes of a split are used, and how many pictures of each."""

    classes: int
    pictures: int


@dataclass(frozen=True)
class Scale:
    """What to compare, on how many pictures and tasks."""

    datasets: tuple[str, ...]
    shots: tuple[int, ...]
    training_tasks: tuple[int, ...]  # of the kernels
    train: dict[str, Pool]  # for each kernel
    validation: Pool
    test: Pool
    validation_tasks: int
    test_tasks: int
    plans: tuple[Plan, ...]  # of the nets

    def judging(self, pool: LabelledImages, split: str, shots: int) -> ImageTasks:
        """Return the tasks that judge, with as many queries as the pools have beside the most shots."""
        pictures = min(self.validation.pictures, self.test.pictures)
        return pool.tasks(split, shots=shots, queries=pictures - max(self.shots))


def _plans(iterations: int, models: Iterable[str]) -> tuple[Plan, ...]:
    """MAML, ANIL and MTL for each of the nets, trained on 1-shot tasks."""
    options: dict[str, dict[str, object]] = {"conv4": {"filters": 32}, "mlp": {"width": 256}}
    plans = []
    for model in models:
        maml = Plan("maml", {"steps": 3, "lr": 0.2}, model, options[model], queries=5, iterations=iterations, lr=3e-3)
        anil = replace(maml, method="anil", method_options={"steps": 5, "lr": 0.1}, iterations=2 * iterations)
        mtl = replace(maml, method="mtl", method_options={}, batch=16, queries=4, lr=1e-2)
        plans += [replace(plan, validate_tasks=60) for plan in (maml, anil, mtl)]
    return tuple(plans)


SCALES = {
    "quick": Scale(
        datasets=("glyphs",),
        shots=(1,),
        training_tasks=(10, 30),
        train={"fully connected": Pool(50, 5), "conv4": Pool(6, 3)},
        validation=Pool(6, 4),
        test=Pool(8, 6),
        validation_tasks=50,
        test_tasks=200,
        plans=_plans(60, ("conv4",)),
    ),
    "paper": Scale(
        datasets=("glyphs", "omniglot"),
        shots=(1, 5),
        training_tasks=(10, 30, 100),
        train={"fully connected": Pool(200, 10), "conv4": Pool(10, 7)},
        validation=Pool(6, 8),
        test=Pool(12, 8),
        validation_tasks=100,
        test_tasks=500,
        plans=_plans(200, ("conv4", "mlp")),
    ),
}


@dataclass(frozen=True, eq=False)
class Table:
    """The kernels between the pictures of a pool, computed once. Points are numbers of pictures, (n, 1)."""

    values: tuple[Tensor, Tensor]  # Θ and K
    seconds: float

    @classmethod
    def of(cls, kernel: AnalyticKernel, pool: LabelledImages, device: str = "cpu") -> Table:
        """Compute what training, validation and testing ask for: no test picture meets a validation picture."""
        started = time.perf_counter()
        x = standardised(pool).to(device)
        if not kernel.pixel_dims:
            x = x.flatten(1)
        values = [torch.full((len(x), len(x)), math.nan, dtype=torch.float64) for _ in range(2)]
        train, *others = (
            pool.tasks(split, shots=1, queries=1).image_indices for split in ("train", "validation", "test")
        )
        for own in (train, *others):
            for table, among in zip(values, kernel.both(x[own])):
                table[own[:, None], own] = among.cpu()
        for own in others:
            for table, between in zip(values, kernel.both(x[own], x[train])):
                table[own[:, None], train] = between.cpu()
                table[train[:, None], own] = between.cpu().mT
        scale = values[0].diagonal().mean()
        return cls((values[0] / scale, values[1] / scale), time.perf_counter() - started)

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Look Θ up."""
        return self.both(x, z)[0]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Look K up."""
        return self.both(x, z)[1]

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Look both up."""
        rows, columns = (points[:, 0].long() for points in (x, x if z is None else z))
        ntk, nngp = (values[rows[:, None], columns] for values in self.values)
        return ntk, nngp


@dataclass(frozen=True, eq=False)
class Numbered:
    """The tasks that `tasks` draws, with the numbers of pictures for points.

    With `order`, one value a picture, a task's labels go by the mean value of each class's support.
    """

    tasks: ImageTasks
    order: Tensor | None = None

    @property
    def outputs(self) -> int:
        """One for each class of a task."""
        return self.tasks.outputs

    def sample(self, tasks: int, generator: torch.Generator) -> Episodes:
        """Draw tasks."""
        drawn = self.tasks.sample_indices(tasks, generator)
        if self.order is not None:
            ranks = self.order[drawn.support].mean(-1).argsort(-1)
            drawn = TaskIndices(*(values.gather(1, _like(ranks, values)) for values in drawn))
        return drawn.to_episodes(lambda rows: rows[..., None].double())


@dataclass(frozen=True, eq=False)
class Trial:
    """One learner on one kind of task: its score, what it cost, and what its kernel scores on the support alone."""

    dataset: str
    shots: int
    learner: str
    trained_on: str
    score: Score
    training_seconds: float
    prediction_seconds: float  # for all test tasks
    note: str
    alone: Score | None = None

    def rows(self) -> list[Row]:
        """Return its rows: the accuracy, and how much of it training added."""
        name = f"{self.dataset}, {self.shots}-shot, {self.learner}, {self.trained_on}"
        each = 1000 * self.prediction_seconds / self.score.tasks
        cost = f"{self.training_seconds:.2g} s to train, {each:.2g} ms a task to predict"
        made = [_row(name, "accuracy %", self.score, f"{self.note}; {cost}")]
        if self.alone is not None:
            gain = self.score.minus(self.alone)
            made.append(_row(f"{name}, gain", "accuracy % above the support alone", gain, "the same tasks"))
        return made


@dataclass(frozen=True)
class Outcome:
    """The result, and the trials that it is made of."""

    result: Result
    trials: tuple[Trial, ...]


def run(work: Work) -> Outcome:
    """Compare kernels and nets on every data set of the scale."""
    scale, started = SCALES[work.scale], time.perf_counter()
    trials: list[Trial] = []
    tables: list[Row] = []
    for dataset in scale.datasets:
        images = small(_images(dataset, work))
        for name, kernel in KERNELS.items():
            pool = pooled(images, scale, name, work.seed)
            table = Table.of(kernel, pool, work.device)
            note = f"{len(pool.images)} pictures at {SIZE} px"
            tables.append(Row(f"{dataset}, {name} kernel", "seconds", ours=table.seconds, note=note))
            for shots in scale.shots:
                trials += Case(scale, dataset, name, shots, table, pool, work.seed).trials(scale.training_tasks)
            upper = standardised(pool)[:, 0, : SIZE // 2].mean((1, 2))
            control = f"{name}, labels by ink,"
            case = Case(scale, dataset, control, scale.shots[0], table, pool, work.seed, upper)
            trials += case.trials(scale.training_tasks[-1:])
        trials += _net_trials(work, scale, dataset, images, pool)
    rows = (*tables, *(row for trial in trials for row in trial.rows()))
    seconds = time.perf_counter() - started
    result = Result(ID, work.scale, work.seed, _settings(scale), environment(work.device), seconds, rows)
    return Outcome(result, tuple(trials))


@dataclass(frozen=True, eq=False)
class Case:
    """One kernel on one kind of task; with `order`, labels go by it."""

    scale: Scale
    dataset: str
    kernel: str
    shots: int
    table: Table
    pool: LabelledImages
    seed: int
    order: Tensor | None = None

    def trials(self, counts: tuple[int, ...]) -> list[Trial]:
        """Return regression on the support alone, and every twin with so many training tasks."""
        everything = self._training_tasks(counts[-1])
        alone = {}
        for name, twin in ALONE.items():
            untrained = [KernelLearner(self.table, twin, s, outer_time=0.0) for s in INNER_TIMES]
            alone[name] = self._trial(name, untrained, everything[:1], UNTRAINED, None)
        found = list(alone.values())
        for twin in TWINS:
            base, name = alone["NTK" if twin == "maml" else "NNGP"].score, twin.upper()
            grid = choices(self.table, twin)
            for tasks in counts:
                found.append(self._trial(name, grid, everything[:tasks], f"{tasks} tasks", base))
            little = [learner for learner in grid if learner.ridge == RIDGES[0]]
            found.append(self._trial(name, little, everything, f"{counts[-1]} tasks, ridge {RIDGES[0]:g}", base))
        return found

    def _trial(
        self, name: str, grid: list[KernelLearner], training: Episodes, trained_on: str, alone: Score | None
    ) -> Trial:
        """Choose a learner on validation tasks, and test it."""
        judged = [self._score(learner.fit(training), "validation") for learner in grid]
        chosen = grid[max(range(len(grid)), key=lambda index: judged[index].mean)]
        began = time.perf_counter()
        fitted = chosen.fit(training)
        trained = time.perf_counter()
        score = self._score(fitted, "test")
        seconds = trained - began, time.perf_counter() - trained
        inner = chosen.inner_time if chosen.test_time is None else chosen.test_time
        note = f"inner time {inner:g}" + (f", ridge {chosen.ridge:g}" if alone else "")
        return Trial(self.dataset, self.shots, f"{self.kernel} {name}", trained_on, score, *seconds, note, alone)

    def _training_tasks(self, tasks: int) -> Episodes:
        drawn = Numbered(self.pool.tasks("train", shots=self.shots, queries=QUERIES[self.shots]), self.order)
        return drawn.sample(tasks, torch.Generator().manual_seed(self.seed))

    def _score(self, fitted: FittedKernelLearner, split: str) -> Score:
        tasks = self.scale.test_tasks if split == "test" else self.scale.validation_tasks
        judging = Numbered(self.scale.judging(self.pool, split, self.shots), self.order)
        return evaluate(fitted, judging, tasks=tasks, seed=self.seed)


def choices(kernel: Kernel, twin: KernelMethod) -> list[KernelLearner]:
    """The twin with every inner time at test, and every ridge.

    MTL has no inner loop in training, and ANIL's must not fit a task exactly, since it trains without a split.
    """
    grid = [(s, ridge) for s in INNER_TIMES for ridge in RIDGES]
    if twin == "maml":
        return [KernelLearner(kernel, twin, s, ridge=ridge) for s, ridge in grid]
    return [KernelLearner(kernel, twin, ANIL_TIME, test_time=s, ridge=ridge) for s, ridge in grid]


def _net_trials(work: Work, scale: Scale, dataset: str, images: LabelledImages, pool: LabelledImages) -> list[Trial]:
    """Train every net on fresh tasks of all training classes, and test it on the kernels' tasks."""
    found = []
    for plan in scale.plans:
        run = replace(plan, seed=work.seed).train(images, device=work.device, progress=work.progress)
        for shots in scale.shots:
            began = time.perf_counter()
            score = evaluate(run, scale.judging(pool, "test", shots), tasks=scale.test_tasks, seed=work.seed)
            seconds = run.seconds, time.perf_counter() - began
            note = f"{plan.iterations} steps of {plan.batch} 1-shot tasks"
            found.append(Trial(dataset, shots, f"{plan.model} net {plan.method.upper()}", FRESH, score, *seconds, note))
    return found


def pooled(images: LabelledImages, scale: Scale, kernel: str, seed: int) -> LabelledImages:
    """Return some classes of every split with some pictures of each; all kernels have the same to be judged on."""
    rows, splits = [], {}
    for split, pool in {"train": scale.train[kernel], "validation": scale.validation, "test": scale.test}.items():
        tasks = images.tasks(split, ways=pool.classes, shots=1, queries=pool.pictures - 1)
        drawn = tasks.sample_indices(1, torch.Generator().manual_seed(seed))
        splits[split] = images.splits[split][drawn.classes[0]]
        rows.append(torch.cat([drawn.support[0], drawn.query[0]], 1).flatten())
    chosen = torch.cat(rows)
    return replace(images, images=images.images[chosen], labels=images.labels[chosen], splits=splits)


def small(images: LabelledImages) -> LabelledImages:
    """Return the images at `SIZE` pixels, each the mean over those that it stands for."""
    size = (SIZE, SIZE)
    parts = [interpolate(part.float(), size=size, mode="area").round().byte() for part in images.images.split(4096)]
    return replace(images, images=torch.cat(parts))


def standardised(images: LabelledImages) -> Tensor:
    """Return each picture with mean 0 and variance 1, in double precision."""
    return layer_norm(images.images.double(), images.images.shape[1:])


def _images(dataset: str, work: Work) -> LabelledImages:
    if dataset == "glyphs":
        return load("glyphs")
    if work.data is None:
        raise InputError(f"data is missing: name the folder that holds {dataset} with --data, or use --scale quick.")
    return load(dataset, work.data / dataset)


def _like(ranks: Tensor, values: Tensor) -> Tensor:
    """The ranks of a task's classes, repeated over what the values have for each class."""
    return ranks if values.ndim == 2 else ranks[..., None].expand(values.shape)


def _settings(scale: Scale) -> dict[str, object]:
    plans = [{"method": p.method, "model": p.model, "iterations": p.iterations, "lr": p.lr} for p in scale.plans]
    grid = {"inner_times": [str(s) for s in INNER_TIMES], "ridges": RIDGES, "size": SIZE}
    return {**asdict(replace(scale, plans=())), **grid, "plans": plans}


def _row(name: str, metric: str, score: Score, note: str) -> Row:
    return Row(name, metric, ours=100 * score.mean, ci95=100 * score.ci95, note=f"{score.tasks} tasks; {note}")


def figure(outcome: Outcome, file: Path) -> None:
    """Draw the accuracies: a panel for every kind of task, a line for every learner, a mark for what it learnt from."""
    from matplotlib.figure import Figure

    from metabridge.report import figures

    marks = [
        (trial, trial.trained_on, trial.score) for trial in outcome.trials if trial.alone or trial.trained_on == FRESH
    ]
    marks = [(trial, UNTRAINED, trial.alone) for trial in outcome.trials if trial.alone] + marks
    panels = list(dict.fromkeys((trial.dataset, trial.shots) for trial, _, _ in marks))
    lines = list(dict.fromkeys(trial.learner for trial, _, _ in marks))
    kinds = [kind for kind in dict.fromkeys(kind for _, kind, _ in marks) if "ridge" not in kind]
    with figures.LIGHT.context():
        page = Figure(figsize=(3.4 + 2.5 * len(panels), 1.6 + 0.36 * len(lines)), layout="constrained")
        for axes, panel in zip(page.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
            for index, kind in enumerate(kinds):
                own = [(t, s) for t, k, s in marks if (t.dataset, t.shots) == panel and k == kind]
                axes.errorbar(
                    [100 * score.mean for _, score in own],
                    [lines.index(trial.learner) + 0.15 * (index - (len(kinds) - 1) / 2) for trial, _ in own],
                    xerr=[100 * score.ci95 for _, score in own],
                    fmt=figures.MARKERS[index],
                    color=figures.COLOURS[index],
                    label="net, fresh tasks" if kind == FRESH else f"kernel, {kind}",
                    markersize=4,
                )
            axes.set(title=f"{panel[0]}, 5-way {panel[1]}-shot", xlabel="accuracy on test tasks, %")
        axes.set_yticks(range(len(lines)), lines)
        axes.invert_yaxis()
        page.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2 * len(panels))
    figures.save(page, file)


EXPERIMENT = UnportedExperiment("kernel-fewshot", run, figure)
