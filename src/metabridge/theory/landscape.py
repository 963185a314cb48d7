"""Closed forms for MAML and non-adaptive learning (NAL) on linear regression (Collins et al. 2022, §3, app. A and D).

A task of a `Landscape` has inputs x ~ N(0, Σ) and targets y = ⟨w*, x⟩ + z, z ~ N(0, σ²). At test time, the
initialization w takes one step of size α on m samples (X̂, ŷ) of the task,

    w' = w − (α/m) X̂ᵀ(X̂w − ŷ),   F_m(w) = E ½(⟨w', x⟩ − y)²   (Collins et al. 2022, eq. 1).

The loss splits into a part that depends on w and one that does not: F_m(w) = 𝓔_m(w) + floor. The paper calls 𝓔_m the
excess risk; its minimum is not 0, since no single w suits all tasks.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from metabridge.environments.linear_tasks import HardEasy, Landscape
from metabridge.episodes import Episodes
from metabridge.errors import InputError, describe

SolutionName = Literal["nal", "maml"]


def adapted_covariance(Sigma: Tensor, alpha: float, s: float, fourth_moments: Tensor | None = None) -> Tensor:
    """Return Q^{(s)}, the quadratic form of the risk after a step on s samples (Collins et al. 2022, §3).

    Q^{(s)} = (I − αΣ)Σ(I − αΣ) + (α²/s)(E[xxᵀΣxxᵀ] − Σ³).

    Args:
        Sigma: Covariances Σ, (..., d, d).
        alpha: Step size α.
        s: Number of samples; infinite for a step on the expected loss.
        fourth_moments: E[xxᵀΣxxᵀ], (..., d, d). The default is tr(Σ²)Σ + 2Σ³, which holds for normal inputs.

    Returns:
        Q^{(s)}, (..., d, d).

    Raises:
        InputError: Unless `s` is infinite or an integer of at least 1.

    Example:
        >>> adapted_covariance(torch.eye(2), alpha=0.5, s=math.inf)
        tensor([[0.2500, 0.0000],
                [0.0000, 0.2500]])
    """
    _check_samples("s", s)
    error_map = torch.eye(Sigma.shape[-1], dtype=Sigma.dtype) - alpha * Sigma  # maps w − w* to the mean of w' − w*
    square = Sigma @ Sigma
    cube = square @ Sigma
    trace = square.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    sampling_term = trace * Sigma + cube if fourth_moments is None else fourth_moments - cube
    return error_map @ Sigma @ error_map + (alpha * alpha / s) * sampling_term


def nal_solution(landscape: Landscape) -> Tensor:
    """Return w*_NAL = E[Σ]⁻¹E[Σw*], to which training without adaptation converges (Collins et al. 2022, eq. 5).

    Args:
        landscape: Distribution of the tasks.

    Returns:
        w*_NAL, (d).

    Example:
        >>> nal_solution(HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape)
        tensor([0.2000, 0.2000], dtype=torch.float64)
    """
    return _weighted_center(landscape, landscape.distribution.covariance)


def maml_solution(landscape: Landscape, alpha: float, n2: float, *, fourth_moments: Tensor | None = None) -> Tensor:
    """Return w*_MAML = E[Q^{(n₂)}]⁻¹E[Q^{(n₂)}w*], to which MAML converges (Collins et al. 2022, eq. 5).

    Args:
        landscape: Distribution of the tasks.
        alpha: Step size α.
        n2: Number n₂ of samples of the inner step; may be infinite.
        fourth_moments: E[xxᵀΣxxᵀ] of each group, (groups, d, d). The default is that of normal inputs.

    Returns:
        w*_MAML, (d).

    Raises:
        InputError: If a setting is out of range, or the solution is not unique.

    Example:
        >>> maml_solution(HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape, alpha=1.0, n2=math.inf)
        tensor([1., 1.], dtype=torch.float64)
    """
    _check_alpha(landscape, alpha)
    _check_samples("n2", n2)
    return _weighted_center(landscape, adapted_covariance(landscape.distribution.covariance, alpha, n2, fourth_moments))


def solution(name: SolutionName, landscape: Landscape, alpha: float, n2: float) -> Tensor:
    """Return the solution of NAL or of MAML by name.

    Args:
        name: "nal" or "maml".
        landscape: Distribution of the tasks.
        alpha: Step size α of MAML.
        n2: Number n₂ of samples of MAML's inner step; may be infinite.

    Returns:
        w*_NAL or w*_MAML, (d).

    Raises:
        InputError: If a setting of MAML is out of range, or its solution is not unique.

    Example:
        >>> solution("nal", HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape, alpha=1.0, n2=25)
        tensor([0.2000, 0.2000], dtype=torch.float64)
    """
    return nal_solution(landscape) if name == "nal" else maml_solution(landscape, alpha, n2)


def risk_above_floor(
    landscape: Landscape, w: Tensor, alpha: float, m: float, *, fourth_moments: Tensor | None = None
) -> Tensor:
    """Return 𝓔_m(w) = ½ E‖w − w*‖² in the norm of Q^{(m)} (Collins et al. 2022, eq. 6, 7).

    Args:
        landscape: Distribution of the tasks.
        w: Initializations, (..., d).
        alpha: Step size α.
        m: Number of samples of the test-time step; may be infinite.
        fourth_moments: E[xxᵀΣxxᵀ] of each group, (groups, d, d). The default is that of normal inputs.

    Returns:
        𝓔_m of every initialization, (...).

    Raises:
        InputError: If a setting is out of range, or w has the wrong dimension.

    Example:
        >>> landscape = HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape
        >>> risk_above_floor(landscape, torch.zeros(2), alpha=1.0, m=math.inf)
        tensor(0.0703, dtype=torch.float64)
    """
    _check_alpha(landscape, alpha)
    _check_samples("m", m)
    distribution = landscape.distribution
    if not w.ndim or w.shape[-1] != landscape.dimension:
        raise InputError(
            f"w is {describe(w)}, but the tasks have {landscape.dimension} dimensions. "
            f"Use a last dimension of {landscape.dimension}."
        )
    # Within a group, w* ~ N(center, spread), so E‖w − w*‖²_Q = ‖w − center‖²_Q + tr(Q·spread).
    Q = adapted_covariance(distribution.covariance, alpha, m, fourth_moments)
    gap = w.double()[..., None, :] - distribution.center
    from_center = torch.einsum("...gi,gij,...gj->...g", gap, Q, gap)
    from_spread = torch.einsum("gij,gji->g", Q, distribution.spread)
    return (from_center + from_spread) @ distribution.probability / 2


def noise_floor(landscape: Landscape, alpha: float, m: float) -> float:
    """Return ½E[σ² + (α²/m)σ² tr(Σ²)], the part of the expected loss F_m that is due to noise.

    Eq. 16 of Collins et al. 2022 lacks the factor ½, which is a misprint.

    Args:
        landscape: Distribution of the tasks.
        alpha: Step size α.
        m: Number of samples of the test-time step; may be infinite.

    Returns:
        The floor.

    Raises:
        InputError: If a setting is out of range.

    Example:
        >>> noise_floor(HardEasy(0.1, 1.0, noise=0.02).landscape, alpha=1.0, m=math.inf)
        0.01
    """
    _check_alpha(landscape, alpha)
    _check_samples("m", m)
    distribution = landscape.distribution
    relative_step_noise = alpha**2 / m * distribution.covariance.square().sum((-2, -1))  # relative to σ²
    return float(distribution.probability @ (distribution.noise * (1 + relative_step_noise))) / 2


def best_alpha(name: SolutionName, landscape: Landscape, m: float) -> float:
    """Return the step size α with the smallest expected loss F_m at the solution of NAL or of MAML.

    α is the size of the test-time step, and for MAML also that of the inner step in training, on n₂ = m samples.

    For MAML, F_m may have several local minima in α, one near the inverse of each group's curvature. The search
    therefore starts with a grid of stable step sizes, and refines the best of them between its neighbors.

    Args:
        name: "nal" or "maml".
        landscape: Distribution of the tasks.
        m: Number of samples of the test-time step, and of MAML's inner step; may be infinite.

    Returns:
        The step size.

    Raises:
        InputError: Unless `m` is infinite or an integer of at least 1.

    Example:
        >>> landscape = HardEasy(rho_hard=0.25, rho_easy=1.0, dimension=2).landscape
        >>> [round(best_alpha(name, landscape, m=math.inf), 6) for name in ("nal", "maml")]
        [1.6, 1.0]
    """
    from scipy import optimize  # slow to import, and training does not need it

    def loss(alpha: float) -> float:
        try:
            w = solution(name, landscape, alpha, m)
        except InputError:  # the solution is not unique for this alpha: use a slightly smaller one
            w = solution(name, landscape, (1 - 1e-4) * alpha, m)
        return float(risk_above_floor(landscape, w, alpha, m)) + noise_floor(landscape, alpha, m)

    grid = torch.linspace(0, _largest_alpha(landscape), 202, dtype=torch.float64)[:-1].tolist()
    best_index = min(range(len(grid)), key=lambda index: loss(grid[index]))
    bounds = grid[max(best_index - 1, 0)], grid[min(best_index + 1, len(grid) - 1)]
    return float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-10}).x)


def empirical_nal(episodes: Episodes) -> Tensor:
    """Return w_NAL = (Σ_i X_iᵀX_i)⁻¹ Σ_i X_iᵀy_i over all points of some tasks (Collins et al. 2022, eq. 41).

    Args:
        episodes: The tasks. Both support and query points are used.

    Returns:
        w_NAL, (d).

    Raises:
        InputError: If the tasks are not linear regression, or the solution is not unique.

    Example:
        >>> from metabridge.environments import LinearTasks
        >>> tasks = LinearTasks(HardEasy(0.1, 1.0, dimension=2).landscape, shots=5, queries=5)
        >>> empirical_nal(tasks.sample(1000, torch.Generator().manual_seed(0))).shape
        torch.Size([2])
    """
    unsplit = _as_regression(episodes).without_split()
    x, y = unsplit.support_x, unsplit.support_y
    return _solve_normal_equations((x.mT @ x).sum(0), (x.mT @ y).sum(0))


def empirical_maml(episodes: Episodes, alpha: float) -> Tensor:
    """Return w_MAML = (Σ Q̂)⁻¹ Σ P̂ X_outᵀ(y_out − (α/n₂)X_out X_inᵀy_in) of some tasks (Collins et al. 2022, eq. 43).

    P̂ = I − (α/n₂)X_inᵀX_in and Q̂ = P̂ X_outᵀX_out P̂. With y = Xw* + z this is the published equation.

    Args:
        episodes: The episodes; several may belong to the same task. Support sets are the n₂ inner samples, query sets
            the n₁ outer samples.
        alpha: Step size α.

    Returns:
        w_MAML, (d).

    Raises:
        InputError: If the tasks are not linear regression, the solution is not unique, or `alpha` is invalid.

    Example:
        >>> from metabridge.environments import LinearTasks
        >>> tasks = LinearTasks(HardEasy(0.1, 1.0, dimension=2).landscape, shots=5, queries=5)
        >>> empirical_maml(tasks.sample(1000, torch.Generator().manual_seed(0)), alpha=1.0).shape
        torch.Size([2])
    """
    if not (math.isfinite(alpha) and alpha >= 0):
        raise InputError(f"alpha is {alpha}, but a step size must be a finite number that is not negative.")
    episodes = _as_regression(episodes)
    x_in, y_in, x_out, y_out = episodes.support_x, episodes.support_y, episodes.query_x, episodes.query_y
    alpha_over_n2 = alpha / x_in.shape[1]
    X_P = x_out - alpha_over_n2 * (x_out @ x_in.mT) @ x_in  # X_out P̂
    target = y_out - alpha_over_n2 * x_out @ (x_in.mT @ y_in)
    return _solve_normal_equations((X_P.mT @ X_P).sum(0), (X_P.mT @ target).sum(0))


class Risks(NamedTuple):
    """𝓔_m at the solutions of NAL and of MAML.

    Args:
        nal: The risk of NAL.
        maml: The risk of MAML.

    Example:
        >>> Risks(nal=3.0, maml=1.5).ratio
        2.0
    """

    nal: float
    maml: float

    @property
    def ratio(self) -> float:
        """The risk of NAL divided by the risk of MAML; infinite if only MAML's risk is 0, and 1 if both are 0."""
        if self.maml == 0:
            return 1.0 if self.nal == 0 else math.inf
        return self.nal / self.maml


def task_weights(hard_easy: HardEasy, alpha: float, m: float) -> tuple[float, float]:
    """Return the weights a_H and a_E of hard and of easy tasks in MAML (Collins et al. 2022, eq. 21, 22).

    a = ρ(1 − αρ)² + ((d + 1)/m)α²ρ³, where ρ is the input variance ρ_H of hard tasks or ρ_E of easy tasks.

    Args:
        hard_easy: The distribution of hard and easy tasks.
        alpha: Step size α.
        m: Number of samples of the inner step; may be infinite.

    Returns:
        a_H and a_E.

    Raises:
        InputError: If a setting is out of range.

    Example:
        >>> task_weights(HardEasy(0.5, 1.0), alpha=1.0, m=math.inf)
        (0.125, 0.0)
    """
    _check_alpha(hard_easy.landscape, alpha)
    _check_samples("m", m)
    a_H, a_E = (
        rho * (1 - alpha * rho) ** 2 + (hard_easy.dimension + 1) / m * alpha**2 * rho**3
        for rho in (hard_easy.rho_hard, hard_easy.rho_easy)
    )
    return a_H, a_E


def hard_easy_risks(hard_easy: HardEasy, alpha: float, m: float) -> Risks:
    """Return the risks of NAL and MAML with n₂ = m on hard and easy tasks (Collins et al. 2022, cor. 1, eq. 10, 11).

    With like terms collected, and with the symbols of `HardEasy` (where d is the dimension) and of `task_weights`,
    𝓔(NAL)  = (d/4)[a_H r_H + a_E r_E + R²(a_H ρ_E² + a_E ρ_H²)/(ρ_E + ρ_H)²] and
    𝓔(MAML) = (d/4)[a_H r_H + a_E r_E + R² a_E a_H/(a_E + a_H)].

    Args:
        hard_easy: The distribution of hard and easy tasks.
        alpha: Step size α.
        m: Number of samples of the inner step and of the test-time step; may be infinite.

    Returns:
        Both risks.

    Raises:
        InputError: If a setting is out of range.

    Example:
        >>> hard_easy = HardEasy(0.1, 0.9, R=5.0, r_hard=2.0, r_easy=2.0)
        >>> round(hard_easy_risks(hard_easy, alpha=1 / 0.9, m=500).ratio, 1)
        3.0
    """
    a_H, a_E = task_weights(hard_easy, alpha, m)
    rho_H, rho_E = hard_easy.rho_hard, hard_easy.rho_easy
    within_groups = a_H * hard_easy.r_hard + a_E * hard_easy.r_easy
    nal_factor = (a_H * rho_E**2 + a_E * rho_H**2) / (rho_E + rho_H) ** 2
    maml_factor = a_E * a_H / (a_E + a_H) if a_E + a_H else 0.0  # a_H = a_E = 0: one step solves all tasks
    d, R = hard_easy.dimension, hard_easy.R
    nal, maml = (d / 4 * (within_groups + R**2 * factor) for factor in (nal_factor, maml_factor))
    return Risks(nal, maml)


def asymptotic_ratio(hard_easy: HardEasy) -> float:
    """Return 1 + R²/r_H, the limit of 𝓔(NAL)/𝓔(MAML) (Collins et al. 2022, cor. 2).

    The ratio of the risks is close to this limit for α = 1/ρ_E, 0 < ρ_H ≪ ρ_E and m ≫ d.

    Args:
        hard_easy: The distribution of hard and easy tasks.

    Returns:
        The ratio; infinite if r_H is 0.

    Example:
        >>> asymptotic_ratio(HardEasy(0.1, 0.9, R=2.0, r_hard=0.5))
        9.0
    """
    return 1 + hard_easy.R**2 / hard_easy.r_hard if hard_easy.r_hard else math.inf


def _weighted_center(landscape: Landscape, weights: Tensor) -> Tensor:
    """Return E[W]⁻¹E[Ww*], where every group of tasks has its weight matrix W in `weights` (groups, d, d)."""
    distribution = landscape.distribution
    matrix = torch.einsum("g,gij->ij", distribution.probability, weights)
    target = torch.einsum("g,gij,gj->i", distribution.probability, weights, distribution.center)
    center, singular = torch.linalg.solve_ex(matrix, target)
    if singular:
        raise InputError(
            "with infinitely many samples and this alpha, one step from any initialization reaches the optimum of "
            "every task along some direction, so the initialization along it is arbitrary and the solution is not "
            "unique. Use another alpha, or a finite number of samples."
        )
    return center  # type: ignore[no-any-return]


def _as_regression(episodes: Episodes) -> Episodes:
    """Convert tasks to float64. Raise an InputError unless they are regression tasks with one output."""
    if episodes.is_classification or episodes.support_y.shape[-1] != 1 or episodes.support_x.ndim != 3:
        raise InputError(
            f"support_x is {describe(episodes.support_x)} and support_y {describe(episodes.support_y)}, but linear "
            "regression needs inputs (tasks, points, d) and targets (tasks, points, 1)."
        )
    return episodes.to(dtype=torch.float64)


def _solve_normal_equations(matrix: Tensor, target: Tensor) -> Tensor:
    eigenvalues = torch.linalg.eigvalsh(matrix)
    if eigenvalues[0] <= 1e-12 * eigenvalues[-1]:
        raise InputError(
            f"the inputs of all tasks together do not span the {len(matrix)} input dimensions, so the solution is "
            "not unique. Use more tasks, or more points per task."
        )
    return torch.linalg.solve(matrix, target).squeeze(-1)  # type: ignore[no-any-return]


def _largest_alpha(landscape: Landscape) -> float:
    return 2 / float(torch.linalg.eigvalsh(landscape.distribution.covariance).max())


def _check_alpha(landscape: Landscape, alpha: float) -> None:
    largest = _largest_alpha(landscape)
    if not 0 <= alpha < largest:
        raise InputError(
            f"alpha is {alpha}, but steps of {largest:.4g} or more diverge on the tasks with the largest curvature. "
            f"Use an alpha from 0 to below {largest:.4g}, twice the inverse of this curvature."
        )


def _check_samples(name: str, value: float) -> None:
    if not (value == math.inf or (value >= 1 and value == int(value))):
        raise InputError(f"{name} is {value!r}, but must be an integer of at least 1, or infinite.")
