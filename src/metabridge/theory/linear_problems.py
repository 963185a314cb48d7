"""Random linear regression problems of hard and easy tasks, and risks of non-adaptive learning (NAL) and MAML."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, Landscape, LinearTasks, TaskGroup, random_covariance
from metabridge.theory.landscape import (
    Risks,
    empirical_maml,
    empirical_nal,
    maml_solution,
    nal_solution,
    risk_above_floor,
)

MAX_STEP = 1.5  # maximum of α times the largest curvature; gradient descent diverges at 2 and above


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """A distribution of linear regression tasks, with the step size and the number of samples of adaptation.

    Args:
        landscape: Distribution of the tasks.
        alpha: Step size α of adaptation.
        m: Number of support points of a task.

    Example:
        >>> problem = LinearProblem(HardEasy(rho_hard=0.1, rho_easy=1.0).landscape, alpha=1.0, m=500)
        >>> problem.population_risks().ratio > 2
        True
    """

    landscape: Landscape
    alpha: float
    m: int

    @classmethod
    def random(cls, seed: int, *, isotropic: bool) -> LinearProblem:
        """Draw a problem with a hard and an easy group of tasks.

        Args:
            seed: Seed of the random numbers.
            isotropic: Whether the covariances are multiples of I as in Collins et al. (2022, §3.2), or random.

        Returns:
            The problem. Its step size is stable for both groups.
        """
        generator = torch.Generator().manual_seed(seed)

        def log_uniform(low: float, high: float) -> float:
            exponent = float(torch.rand((), generator=generator, dtype=torch.float64))
            return float(low * (high / low) ** exponent)

        d = int(log_uniform(5, 21))
        rho_easy = log_uniform(0.5, 2)
        rho_hard, R = rho_easy * log_uniform(0.03, 1), log_uniform(0.5, 8)
        r_hard, r_easy, noise = log_uniform(0.02, 2), log_uniform(0.02, 2), log_uniform(0.01, 1)
        alpha, m = log_uniform(0.8, 1.1) / rho_easy, int(log_uniform(30, 500))
        if isotropic:
            return cls(HardEasy(rho_hard, rho_easy, R, r_hard, r_easy, d, noise).landscape, alpha, m)
        center = torch.nn.functional.normalize(torch.randn(d, generator=generator).double(), dim=0) * R * math.sqrt(d)
        groups = (
            TaskGroup(rho_hard * random_covariance(d, 0.3, generator), center, r_hard, noise, 0.5),
            TaskGroup(rho_easy * random_covariance(d, 0.3, generator), 0.0, r_easy, noise, 0.5),
        )
        landscape = Landscape(groups, d)
        curvature = float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())
        return cls(landscape, min(alpha, MAX_STEP / curvature), m)

    def environment(self, queries: int) -> LinearTasks:
        """Return the environment of the tasks.

        Args:
            queries: Number of query points of a task.

        Returns:
            The environment.
        """
        return LinearTasks(self.landscape, self.m, queries)

    def trained_risks(self, tasks: int, queries: int, seed: int) -> Risks:
        """Train NAL and MAML on sampled tasks, and return the risk 𝓔_m of each solution in closed form.

        See `risk_above_floor` for 𝓔_m.

        Args:
            tasks: Number of training tasks.
            queries: Number of query points of a task.
            seed: Seed of the tasks.

        Returns:
            The risks.
        """
        episodes = self.environment(queries).sample(tasks, torch.Generator().manual_seed(seed))
        return self._risks(empirical_nal(episodes), empirical_maml(episodes, self.alpha))

    def population_risks(self) -> Risks:
        """Return the risk 𝓔_m of NAL and of MAML after training on infinitely many tasks; see `risk_above_floor`."""
        return self._risks(nal_solution(self.landscape), maml_solution(self.landscape, self.alpha, self.m))

    def _risks(self, nal: Tensor, maml: Tensor) -> Risks:
        risks = risk_above_floor(self.landscape, torch.stack([nal, maml]), self.alpha, self.m)
        return Risks(*risks.tolist())
