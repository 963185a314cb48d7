"""D's table 1: the risk on new tasks of 20 and of 30 points, after one gradient step and by ridge regression.

A number of ours agrees with a published one within three standard deviations of the published plus one of ours. Risks
are exact over tasks and noise; those of ridge regression are means over designs. Proposition 1 is set beside the error
that it bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch

from metabridge.experiments.anil_trainings import METHODS, SETTINGS, Outcome, ridge_risk, row, trained
from metabridge.experiments.linear_anil import Setting
from metabridge.experiments.result import Result, Row, UnportedExperiment, Work
from metabridge.theory.adaptation import error_bound, one_step_estimate
from metabridge.theory.anil import limiting_gram

ID = "anil-table1"

# By method and estimator, for 20 and for 30 points: the mean and the standard deviation over 10 runs.
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
BASELINES = {"single-task": "single task", "oracle": "oracle"}  # which need no training


def run(work: Work) -> Outcome:
    """Train every method, or read its record, and compute the baselines."""
    setting = SETTINGS[work.scale]
    records = trained(work, setting)
    risks = {(name, key): values for name, record in records.items() for key, values in record.risks.items()}
    rows = (*risk_rows(baselines(setting, work.seed) | risks, setting, work.scale), *bound_rows(setting, work.seed))
    return Outcome(Result.of(work, ID, rows, records), records, setting)


def baselines(setting: Setting, seed: int) -> dict[tuple[str, str], list[float]]:
    """Return the risks of ridge regression on the inputs themselves, and on the true representation."""
    eye = torch.eye(setting.dimension, dtype=torch.float64)
    found: dict[tuple[str, str], list[float]] = {}
    for points in setting.m_test:
        for world in setting.worlds(seed):
            for name, basis in (("single-task", eye), ("oracle", world.representation)):
                risk = ridge_risk(setting, world, basis, points)
                found.setdefault((name, f"ridge, {points} points"), []).append(risk)
    return found


def risk_rows(risks: Mapping[tuple[str, str], list[float]], setting: Setting, scale: str) -> list[Row]:
    """Give every risk beside the published one."""
    made = []
    for (name, estimator), numbers in PUBLISHED.items():
        for points, (published, deviation) in zip(setting.m_test, numbers):
            values = risks.get((name, f"{estimator}, {points} points"))
            if values is None:
                continue
            own = float(torch.tensor(values, dtype=torch.float64).std())
            ours = sum(values) / len(values)
            comparable = scale == "paper" or name in BASELINES
            made.append(
                row(
                    f"{(METHODS | BASELINES)[name]}, {estimator}, {points} points",
                    "excess risk",
                    values,
                    published=published,
                    agrees=abs(ours - published) <= 3 * deviation + own if comparable else None,
                    note=f"deviation over {len(values)} runs {own:.3f}, published {deviation:.2f}"
                    + ("" if comparable else "; trained for less than the published"),
                )
            )
    return made


def bound_rows(setting: Setting, seed: int) -> list[Row]:
    """Give the error after one step at theorem 1's limit, over proposition 1's bound without its constant.

    It is the quantile of the probability with which the bound holds: the least constant that would do.
    """
    covariance = setting.covariance()
    root = torch.linalg.cholesky(limiting_gram(covariance, setting.noise, setting.rates))
    rank = len(covariance)
    share = 1 - 4 * math.exp(-rank / 2)
    made = []
    for points in setting.m_test:
        ratios = []
        for world in setting.worlds(seed):
            generator = torch.Generator().manual_seed(world.seed)
            # The net has forgotten all but col(B*), so a task is its k coordinates there.
            x = torch.randn(setting.designs, points, rank, generator=generator, dtype=torch.float64)
            w = torch.randn(setting.designs, rank, generator=generator, dtype=torch.float64) @ covariance.sqrt()
            z = math.sqrt(setting.noise) * torch.randn(x.shape[:2], generator=generator, dtype=torch.float64)
            y = (x @ w[..., None])[..., 0] + z
            errors = (one_step_estimate(root, w.new_zeros(rank), x, y, setting.alpha) - w).norm(dim=-1)
            bounds = error_bound(w.norm(dim=-1), covariance, setting.noise, setting.rates, points)
            ratios.append(float((errors / bounds).quantile(share)))
        made.append(
            row(
                f"theorem 1's limit, 1-GD, {points} points",
                f"error over proposition 1's bound, {share:.0%} quantile",
                ratios,
                agrees=max(ratios) <= 1,
                note="agrees if the bound holds with a constant of 1",
            )
        )
    return made


def figure(outcome: Outcome, file: Path) -> None:
    """Draw our risks beside the published ones."""
    from metabridge.report import figures
    from metabridge.report.result_figures import compared_rows

    compared = [own for own in outcome.result.rows if own.published is not None]
    figures.save(compared_rows(compared), file)


EXPERIMENT = UnportedExperiment("anil-table1", run, figure, resumable=True)
