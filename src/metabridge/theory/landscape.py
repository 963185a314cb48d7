"""When adaptation pays: MAML and non-adaptive learning (NAL) on linear regression, in closed form (C §3, app. A and D).

A task of a `Landscape` has inputs x ~ N(0, Σ) and targets y = ⟨w*, x⟩ + z, z ~ N(0, σ²). At test the initialisation w
takes one step of size α on m samples of the task,

    w' = w − (α/m) X̂ᵀ(X̂w − ŷ),   F_m(w) = E ½(⟨w', x⟩ − y)²   (C eq. 1),

which splits into what w decides and what it does not: F_m(w) = 𝓔_m(w) + floor. The paper calls 𝓔_m the excess risk;
its least value is not 0, since no single w suits all tasks.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, Landscape
from metabridge.episodes import Episodes
from metabridge.errors import InputError, describe

Solution = Literal["nal", "maml"]


def adapted_covariance(Sigma: Tensor, alpha: float, s: float, fourth: Tensor | None = None) -> Tensor:
    """Q^{(s)} = (I − αΣ)Σ(I − αΣ) + (α²/s)(E[xxᵀΣxxᵀ] − Σ³) of one or more Σ (C §3).

    The quadratic form by which an error of the initialisation is felt after a step on s samples; s = ∞ is a step on
    the population. `fourth` is E[xxᵀΣxxᵀ]. If it is not given, inputs are normal, for which it is tr(Σ²)Σ + 2Σ³.

    >>> adapted_covariance(torch.eye(2), alpha=0.5, s=math.inf)
    tensor([[0.2500, 0.0000],
            [0.0000, 0.2500]])
    """
    _check_samples("s", s)
    step = torch.eye(Sigma.shape[-1], dtype=Sigma.dtype) - alpha * Sigma
    square = Sigma @ Sigma
    cube = square @ Sigma
    trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    of_samples = trace * Sigma + cube if fourth is None else fourth - cube
    return step @ Sigma @ step + (alpha * alpha / s) * of_samples


def nal_solution(landscape: Landscape) -> Tensor:
    """w*_NAL = E[Σ]⁻¹E[Σw*], what training without adaptation converges to (C eq. 5).

    >>> nal_solution(HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape)
    tensor([0.2000, 0.2000], dtype=torch.float64)
    """
    return _weighted_centre(landscape, landscape.distribution.covariance)


def maml_solution(landscape: Landscape, alpha: float, n2: float, *, fourth: Tensor | None = None) -> Tensor:
    """w*_MAML = E[Q^{(n₂)}]⁻¹E[Q^{(n₂)}w*], what MAML with n₂ inner samples converges to (C eq. 5).

    `fourth` is E[xxᵀΣxxᵀ] of each group (groups, d, d) where inputs are not normal.

    >>> maml_solution(HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape, alpha=1.0, n2=math.inf)
    tensor([1., 1.], dtype=torch.float64)
    """
    _check_alpha(landscape, alpha)
    _check_samples("n2", n2)
    return _weighted_centre(landscape, adapted_covariance(landscape.distribution.covariance, alpha, n2, fourth))


def solution(name: Solution, landscape: Landscape, alpha: float, n2: float) -> Tensor:
    """Return w*_NAL or w*_MAML by name."""
    return nal_solution(landscape) if name == "nal" else maml_solution(landscape, alpha, n2)


def risk_above_floor(
    landscape: Landscape, w: Tensor, alpha: float, m: float, *, fourth: Tensor | None = None
) -> Tensor:
    """𝓔_m(w) = ½ E‖w − w*‖² in the norm of Q^{(m)}, for one or more initialisations (..., d) (C eq. 6, 7).

    Within a group E‖w − w*‖²_Q = ‖w − centre‖²_Q + tr(Q·spread). `fourth` is E[xxᵀΣxxᵀ] of each group (groups, d, d)
    where inputs are not normal.

    >>> world = HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape
    >>> risk_above_floor(world, torch.zeros(2), alpha=1.0, m=math.inf)
    tensor(0.0703, dtype=torch.float64)
    """
    _check_alpha(landscape, alpha)
    _check_samples("m", m)
    law = landscape.distribution
    if not w.ndim or w.shape[-1] != landscape.dimension:
        raise InputError(f"w is {describe(w)}, but tasks are in {landscape.dimension} dimensions.")
    Q = adapted_covariance(law.covariance, alpha, m, fourth)
    gap = w.double()[..., None, :] - law.centre
    from_centre = torch.einsum("...gi,gij,...gj->...g", gap, Q, gap)
    spread = torch.einsum("gij,gji->g", Q, law.spread)
    return (from_centre + spread) @ law.probability / 2


def noise_floor(landscape: Landscape, alpha: float, m: float) -> float:
    """½E[σ² + (α²/m)σ² tr(Σ²)]: the part of F_m that noise makes (C eq. 16, which misprints it without the ½).

    >>> noise_floor(HardEasy(0.1, 1.0, noise=0.02).landscape, alpha=1.0, m=math.inf)
    0.01
    """
    _check_alpha(landscape, alpha)
    _check_samples("m", m)
    law = landscape.distribution
    through_step = alpha**2 / m * law.covariance.square().sum((-2, -1))
    return float(law.probability @ (law.noise * (1 + through_step))) / 2


def best_alpha(name: Solution, landscape: Landscape, m: float) -> float:
    """Return the step size α with the least F_m at the solution for that α, n₂ = m.

    The least value on a grid of stable steps is refined between its neighbours: for MAML there may be more than
    one minimum, one near the inverse of each group's curvature.

    >>> world = HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape
    >>> [round(best_alpha(name, world, m=math.inf), 6) for name in ("nal", "maml")]
    [1.6, 1.0]
    """
    from scipy import optimize  # takes a while to import, and training does without

    def loss(alpha: float) -> float:
        try:
            w = solution(name, landscape, alpha, m)
        except InputError:  # a step that solves all tasks in some direction: the solution for a step beside it is one
            w = solution(name, landscape, (1 - 1e-4) * alpha, m)
        return float(risk_above_floor(landscape, w, alpha, m)) + noise_floor(landscape, alpha, m)

    grid = torch.linspace(0, _largest_alpha(landscape), 202, dtype=torch.float64)[:-1].tolist()
    best = min(range(len(grid)), key=lambda place: loss(grid[place]))
    ends = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    return float(optimize.minimize_scalar(loss, bounds=ends, method="bounded", options={"xatol": 1e-10}).x)


def empirical_nal(episodes: Episodes) -> Tensor:
    """w_NAL = (Σ_i X_iᵀX_i)⁻¹ Σ_i X_iᵀy_i over all points of T tasks (C eq. 41).

    >>> from metabridge.environments import LinearTasks
    >>> tasks = LinearTasks(HardEasy(0.1, 1.0, dimension=2).landscape, shots=5, queries=5)
    >>> empirical_nal(tasks.sample(1000, torch.Generator().manual_seed(0))).shape
    torch.Size([2])
    """
    whole = _doubled(episodes).without_split()
    x, y = whole.support_x, whole.support_y
    return _solved((x.mT @ x).sum(0), (x.mT @ y).sum(0))


def empirical_maml(episodes: Episodes, alpha: float) -> Tensor:
    """w_MAML = (Σ Q̂)⁻¹ Σ P̂ X_outᵀ(y_out − (α/n₂)X_out X_inᵀy_in) over τ episodes of T tasks (C eq. 43).

    P̂ = I − (α/n₂)X_inᵀX_in and Q̂ = P̂ X_outᵀX_out P̂. Support sets are the n₂ inner samples, query sets the n₁ outer
    ones, and episodes of the same task count like any others. Putting y = Xw* + z in gives the equation as printed.

    >>> from metabridge.environments import LinearTasks
    >>> tasks = LinearTasks(HardEasy(0.1, 1.0, dimension=2).landscape, shots=5, queries=5)
    >>> empirical_maml(tasks.sample(1000, torch.Generator().manual_seed(0)), alpha=1.0).shape
    torch.Size([2])
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise InputError(f"alpha is {alpha}, but a step size must be a finite number that is not negative.")
    given = _doubled(episodes)
    x_in, y_in, x_out, y_out = given.support_x, given.support_y, given.query_x, given.query_y
    step = alpha / x_in.shape[1]
    adapted = x_out - step * (x_out @ x_in.mT) @ x_in  # X_out P̂
    target = y_out - step * x_out @ (x_in.mT @ y_in)
    return _solved((adapted.mT @ adapted).sum(0), (adapted.mT @ target).sum(0))


class Risks(NamedTuple):
    """𝓔_m at the solutions of NAL and of MAML."""

    nal: float
    maml: float

    @property
    def ratio(self) -> float:
        """How many times larger the risk of NAL is; infinitely where MAML has none, and 1 where neither has any."""
        if self.maml == 0:
            return 1.0 if self.nal == 0 else math.inf
        return self.nal / self.maml


def task_weights(world: HardEasy, alpha: float, m: float) -> tuple[float, float]:
    """a_H and a_E, a = ρ(1 − αρ)² + ((d + 1)/m)α²ρ³: the weights of hard and of easy tasks in MAML (C eq. 21, 22).

    >>> task_weights(HardEasy(0.5, 1.0), alpha=1.0, m=math.inf)
    (0.125, 0.0)
    """
    _check_alpha(world.landscape, alpha)
    _check_samples("m", m)
    a_H, a_E = (
        rho * (1 - alpha * rho) ** 2 + (world.dimension + 1) / m * alpha**2 * rho**3
        for rho in (world.rho_hard, world.rho_easy)
    )
    return a_H, a_E


def hard_easy_risks(world: HardEasy, alpha: float, m: float) -> Risks:
    """Corollary 1 with n₂ = m, its terms gathered (C eq. 10, 11).

    𝓔(NAL)  = (d/4)[a_H r_H + a_E r_E + R²(a_H ρ_E² + a_E ρ_H²)/(ρ_E + ρ_H)²]
    𝓔(MAML) = (d/4)[a_H r_H + a_E r_E + R² a_E a_H/(a_E + a_H)]

    >>> round(hard_easy_risks(HardEasy(0.1, 0.9, R=5.0, r_hard=2.0, r_easy=2.0), alpha=1 / 0.9, m=500).ratio, 1)
    3.0
    """
    a_H, a_E = task_weights(world, alpha, m)
    rho_H, rho_E = world.rho_hard, world.rho_easy
    spread = a_H * world.r_hard + a_E * world.r_easy
    nal = (a_H * rho_E**2 + a_E * rho_H**2) / (rho_E + rho_H) ** 2
    maml = a_E * a_H / (a_E + a_H) if a_E + a_H else 0.0  # a step solves both kinds of tasks
    return Risks(*(world.dimension / 4 * (spread + world.R**2 * share) for share in (nal, maml)))


def asymptotic_ratio(world: HardEasy) -> float:
    """1 + R²/r_H, what 𝓔(NAL)/𝓔(MAML) tends to for α = 1/ρ_E, 0 < ρ_H ≪ ρ_E and m ≫ d (C corollary 2).

    >>> asymptotic_ratio(HardEasy(0.1, 0.9, R=2.0, r_hard=0.5))
    9.0
    """
    return 1 + world.R**2 / world.r_hard if world.r_hard else math.inf


def _weighted_centre(landscape: Landscape, weights: Tensor) -> Tensor:
    """E[W]⁻¹E[Ww*] for a weight matrix W of each group, of which w* is independent within the group."""
    law = landscape.distribution
    total = torch.einsum("g,gij->ij", law.probability, weights)
    pull = torch.einsum("g,gij,gj->i", law.probability, weights, law.centre)
    solved, singular = torch.linalg.solve_ex(total, pull)
    if singular:
        raise InputError(
            "a step on infinitely many samples solves every task in some direction, whatever the start, so there is no "
            "single solution. Use another alpha, or a finite number of samples."
        )
    return solved  # type: ignore[no-any-return]


def _doubled(episodes: Episodes) -> Episodes:
    if episodes.is_classification or episodes.support_y.shape[-1] != 1 or episodes.support_x.ndim != 3:
        raise InputError(
            f"support_x is {describe(episodes.support_x)} and support_y {describe(episodes.support_y)}, but linear "
            "regression has points (tasks, points, d) and one value for each, (tasks, points, 1)."
        )
    return episodes.to(dtype=torch.float64)


def _solved(matrix: Tensor, pull: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh(matrix)
    if values[0] <= 1e-12 * values[-1]:
        raise InputError(
            f"the points of all tasks do not span their {len(matrix)} dimensions, so there is no single solution. "
            "Give more tasks, or more points of each."
        )
    return torch.linalg.solve(matrix, pull).squeeze(-1)  # type: ignore[no-any-return]


def _largest_alpha(landscape: Landscape) -> float:
    return 2 / float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())


def _check_alpha(landscape: Landscape, alpha: float) -> None:
    most = _largest_alpha(landscape)
    if not 0 <= alpha < most:
        raise InputError(
            f"alpha is {alpha}, but steps of {most:.4g} or more diverge on the steepest of these tasks. "
            f"Use alpha from 0 to below {most:.4g}, twice the inverse of its largest curvature."
        )


def _check_samples(name: str, value: float) -> None:
    if not (value == math.inf or (value >= 1 and value == int(value))):
        raise InputError(f"{name} is {value!r}, but must be a whole number of at least 1, or infinite.")
