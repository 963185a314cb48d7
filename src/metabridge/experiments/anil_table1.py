"""Yüksel et al. (2023, table 1): excess risks of one gradient step (1-GD) and of ridge regression on new tasks.

The tasks have 20 or 30 points. A risk agrees with the published one if they differ by at most three published standard
deviations plus one of ours. Our risks are exact expectations over tasks and noise; those of ridge regression are also
averaged over random inputs. The error after one step is also compared with the bound of proposition 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from metabridge.experiments.anil_training_runs import (
    METHODS,
    SETTINGS,
    LinearRecord,
    ridge_risk,
    train_all_methods,
)
from metabridge.experiments.experiment import ExperimentOptions, Outcome, TrainingExperiment
from metabridge.report.results import Row
from metabridge.theory.adaptation import sample_error_bound_ratios
from metabridge.training.linear_anil import LinearAnilConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# By method ("fo" means first-order) and estimator: mean and standard deviation of the excess risk over 10 runs, for 20
# and for 30 points.
PUBLISHED = {
    ("single-task", "ridge"): ((1.84, 0.03), (1.63, 0.02)),
    ("oracle", "ridge"): ((0.50, 0.01), (0.34, 0.01)),
    ("burer-monteiro", "ridge"): ((1.23, 0.03), (1.03, 0.02)),
    ("fo-anil", "1-GD"): ((0.81, 0.01), (0.64, 0.01)),
    ("fo-anil", "ridge"): ((0.73, 0.03), (0.57, 0.02)),
    ("fo-maml", "1-GD"): ((0.81, 0.01), (0.63, 0.01)),
    ("fo-maml", "ridge"): ((0.73, 0.04), (0.58, 0.01)),
    ("infinite-tasks", "1-GD"): ((0.77, 0.01), (0.60, 0.01)),
    ("infinite-tasks", "ridge"): ((0.67, 0.03), (0.52, 0.01)),
    ("infinite-samples", "1-GD"): ((1.78, 0.02), (1.19, 0.01)),
    ("infinite-samples", "ridge"): ((1.04, 0.02), (0.84, 0.02)),
}
BASELINES = {"single-task": "single task", "oracle": "oracle"}  # methods without training

Risks = Mapping[tuple[str, str], list[float]]  # excess risk of each run, by method and a key such as "ridge, 20 points"


def rows(records: Mapping[str, LinearRecord], options: ExperimentOptions) -> Iterator[Row]:
    """Yield the risks of baselines and trained methods, and the error after one step divided by its bound."""
    config = SETTINGS[options.scale]
    risks = {(name, key): values for name, record in records.items() for key, values in record.risks.items()}
    yield from risk_rows(baseline_risks(config, options.seed) | risks, config, options.scale)
    yield from bound_rows(config, options.seed)


def baseline_risks(config: LinearAnilConfig, seed: int) -> dict[tuple[str, str], list[float]]:
    """Return the risks of ridge regression on the inputs ("single-task") and on the true representation ("oracle").

    The keys are those of `Risks`. There is one risk for each of the environments that `seed` determines.
    """
    identity = torch.eye(config.dimension, dtype=torch.float64)
    risks: dict[tuple[str, str], list[float]] = {}
    for points in config.m_test:
        for environment in config.environments(seed):
            for name, basis in (("single-task", identity), ("oracle", environment.representation)):
                risk = ridge_risk(config, environment, basis, points)
                risks.setdefault((name, f"ridge, {points} points"), []).append(risk)
    return risks


def risk_rows(risks: Risks, config: LinearAnilConfig, scale: str) -> Iterator[Row]:
    """Yield each risk, compared with the published one."""
    for (name, estimator), published_risks in PUBLISHED.items():
        for points, (published, published_std) in zip(config.m_test, published_risks):
            values = risks.get((name, f"{estimator}, {points} points"))
            if values is None:
                continue
            std = float(torch.tensor(values, dtype=torch.float64).std())
            mean = sum(values) / len(values)
            comparable = scale == "paper" or name in BASELINES  # at the quick scale, networks are trained too briefly
            note = f"deviation over {len(values)} runs {std:.3f}, published {published_std:.2f}"
            yield Row.mean(
                f"{(METHODS | BASELINES)[name]}, {estimator}, {points} points",
                "excess risk",
                values,
                published=published,
                agrees=abs(mean - published) <= 3 * published_std + std if comparable else None,
                note=note if comparable else f"{note}; trained for fewer steps than in the paper",
            )


def bound_rows(config: LinearAnilConfig, seed: int) -> Iterator[Row]:
    """Yield the error after one step, divided by the bound of proposition 1 without its constant.

    The network is the limit of theorem 1. According to the proposition, there is a constant such that, with probability
    p, the error is at most the constant times the bound. The rows contain the p-quantile of the ratio over tasks, which
    is the smallest such constant.
    """
    probability = 1 - 4 * math.exp(-len(config.variances) / 2)
    for points in config.m_test:
        quantiles = []
        for environment in config.environments(seed):
            generator = torch.Generator().manual_seed(environment.seed)
            ratios = sample_error_bound_ratios(
                config.covariance(), config.noise, config.anil_settings, points, config.designs, generator
            )
            quantiles.append(float(ratios.quantile(probability)))
        yield Row.mean(
            f"theorem 1's limit, 1-GD, {points} points",
            f"error / proposition 1's bound, {probability:.0%} quantile",
            quantiles,
            agrees=max(quantiles) <= 1,
            note="agrees if the bound holds with a constant of 1",
        )


def figure(outcome: Outcome[Mapping[str, LinearRecord]]) -> Figure:
    """Draw our risks next to the published ones."""
    from metabridge.report import result_figures

    return result_figures.compared_rows([row for row in outcome.result.rows if row.published is not None])


EXPERIMENT = TrainingExperiment("anil-table1", train_all_methods, rows, figure)
