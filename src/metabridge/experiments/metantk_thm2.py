"""Wang et al. 2022, theorem 2: for large widths, the predictions of trained MAML are those of MetaNTK regression.

After training for a time t with the learning rate η, the predictions on the queries of test tasks are
F_t = G + Φ' T_Φ^{ηt}(Y − G_train), where T_Φ^s = Φ⁻¹(I − e^{−sΦ}). G and G_train are the predictions that inner
adaptation alone makes on test and training tasks, Y the training targets, Φ the MetaNTK (the neural tangent kernel of
MAML) of the training tasks, and Φ' the MetaNTK between test and training tasks. The experiment compares the predictions
of trained networks with F_t at a finite time and at the end of training. It also compares multi-task learning (MTL) and
ANIL with the predictions of lemma 1 of Wang et al. 2021. The formulas are for gradient flow, so all inner steps are
small, and also the outer steps up to the finite time. The result at the end of training does not depend on the outer
step size, so the remaining outer steps are larger. The papers have proofs but no experiment for these statements.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.experiments.experiment import Experiment, ExperimentOptions, Outcome
from metabridge.experiments.wide_nets import CONSTANTS, DEPTH, KERNEL, TASKS, initialization_seeds, sample_tasks
from metabridge.kernels.finite_width import CenteredTraining, ConvergenceRate, squared_loss
from metabridge.kernels.kernel_predictors import KernelLearner, KernelMethod
from metabridge.learners.method import Method, method
from metabridge.models import wide
from metabridge.report.results import Row
from metabridge.theory.power_law import PowerLaw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS: tuple[KernelMethod, ...] = ("mtl", "anil", "maml")


@dataclass(frozen=True)
class Settings:
    """The widths, the number of networks of each width, and how they are trained."""

    widths: tuple[int, ...]
    nets: int  # number of networks of each width
    tasks: int = 3
    test_tasks: int = 10
    inner_time: float = 0.05  # λτ, inner learning rate times number of inner steps, in training and at test time
    inner_steps: int = 10
    outer_time: float = 3.0  # ηt·σ_max(Φ), the finite time of training
    outer_steps: int = 30
    remainder: float = 0.003  # fraction of the error along the slowest eigenvector of Φ that remains at the end


SETTINGS = {
    "quick": Settings(widths=(16, 64, 256), nets=3, inner_steps=5, outer_steps=15, remainder=0.03),
    "paper": Settings(widths=(64, 128, 256, 512, 1024), nets=4),
}


@dataclass(frozen=True)
class Stage:
    """A stage of training by gradient descent, and the predictions of the kernel at the end of the stage."""

    name: str
    lr: float
    steps: int
    kernel_prediction: Tensor


Errors = dict[str, dict[KernelMethod, dict[int, list[float]]]]  # relative errors by stage, method and width


def measure(options: ExperimentOptions) -> Errors:
    """Train networks of each width from several initializations, all on the same tasks."""
    settings = SETTINGS[options.scale]
    episodes = sample_tasks(settings.tasks + settings.test_tasks, options.seed).to(options.device)
    train, test = episodes[: settings.tasks], episodes[settings.tasks :]
    stages = {name: plan_stages(settings, name, train, test) for name in METHODS}
    errors: Errors = {}
    for width, seeds in initialization_seeds(settings.widths, settings.nets, options.seed).items():
        for name, seed in itertools.product(METHODS, seeds):
            training_method, test_method = methods(settings, name)
            net = wide(TASKS.dimension, width=width, depth=DEPTH, seed=seed).to(options.device)
            training = CenteredTraining(training_method, net, train)  # of the outputs minus the initial outputs
            for stage in stages[name]:
                training.descend(stage.lr, stage.steps)
                difference = training.predict(test_method, test) - stage.kernel_prediction
                error = float(difference.norm() / stage.kernel_prediction.norm())
                errors.setdefault(stage.name, {}).setdefault(name, {}).setdefault(width, []).append(error)
    return errors


def plan_stages(settings: Settings, name: KernelMethod, train: Episodes, test: Episodes) -> tuple[Stage, Stage]:
    """Return a stage of small steps up to the finite time, and a stage of larger steps to convergence."""
    inner_time = 0.0 if name == "mtl" else settings.inner_time
    learner = KernelLearner(KERNEL, name, inner_time=inner_time, test_time=settings.inner_time)
    fully_trained = learner.fit(train)
    convergence = ConvergenceRate.from_kernel(fully_trained.matrix)
    finite_time = settings.outer_time / convergence.largest_eigenvalue
    stopped_early = replace(learner, outer_time=finite_time).fit(train)
    steps = convergence.steps(settings.remainder)
    return (
        Stage("stopped early", finite_time / settings.outer_steps, settings.outer_steps, stopped_early.predict(test)),
        Stage("trained to the end", convergence.lr, steps, fully_trained.predict(test)),
    )


def methods(settings: Settings, name: KernelMethod) -> tuple[Method, Method]:
    """Return the method for training and the method for adaptation at test time."""
    inner_lr = settings.inner_time / settings.inner_steps
    inner = {"steps": settings.inner_steps, "lr": inner_lr, "loss": squared_loss}
    if name == "maml":
        return (method("maml", **inner),) * 2
    anil = method("anil", **inner, split=False)
    return (method("mtl", loss=squared_loss) if name == "mtl" else anil), anil


def rows(errors: Errors, _: ExperimentOptions) -> Iterator[Row]:
    """Yield rows of the exponent of the width in the error, and of the error at each width, by stage and method."""
    note = "agrees if the error decreases with the width: the interval over initializations is below 0"
    for stage, errors_by_method in errors.items():
        for name, errors_by_width in errors_by_method.items():
            label, law = f"{name.upper()} {stage}", PowerLaw.fit(errors_by_width)
            agrees = law.exponent + law.ci95 < 0
            yield Row(label, "exponent of the width", ours=law.exponent, ci95=law.ci95, agrees=agrees, note=note)
            for width, values in errors_by_width.items():
                yield Row.mean(f"{label}, width {width}", "relative error", values)


def figure(outcome: Outcome[Errors]) -> Figure:
    """Draw the errors as functions of the width, with one panel for each stage."""
    from matplotlib.figure import Figure

    from metabridge.report import result_figures

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (stage, errors_by_method) in zip(panels, outcome.data.items()):
        curves = {f"{name.upper()} {stage}": errors_by_width for name, errors_by_width in errors_by_method.items()}
        result_figures.draw_power_laws(axes, curves)
    panels[0].set(ylabel="‖trained − kernel prediction‖ / ‖kernel prediction‖\non the queries of test tasks")
    return figure


EXPERIMENT = Experiment("metantk-thm2", measure, rows, figure, SETTINGS, CONSTANTS)
