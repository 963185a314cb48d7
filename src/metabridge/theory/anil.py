"""First-order ANIL of a linear network x ↦ ⟨Bw, x⟩ in the limit of many tasks (Yüksel et al. 2023, §2.2, §3).

Tasks are y = ⟨θ, x⟩ + z with x ~ N(0, I_d) and z of variance σ². In the limit they enter only through the moments of θ.
The parameters are θ = B*w* with the true representation B* (d, k), whose columns are orthonormal, and w* of covariance
Σ*. B*⊥ is an orthonormal basis of the orthogonal complement. m is the number of points in the inner loop, `m_in`, and
k' the width of the hidden layer. Functions of B (..., d, k') and w (..., k') accept leading axes, to compute several
runs at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from metabridge.environments.shared_representation import SharedRepresentation
from metabridge.errors import InputError, check_positive


@dataclass(frozen=True)
class AnilSettings:
    """Settings of first-order ANIL.

    Args:
        alpha: Step size α of the inner loop.
        beta: Step size β of the outer loop.
        m_in: Number of points per task in the inner loop; may be infinite.

    Raises:
        InputError: If a setting is out of range.

    Example:
        >>> AnilSettings(m_in=10)
        AnilSettings(alpha=0.025, beta=0.025, m_in=10)
    """

    alpha: float = 0.025
    beta: float = 0.025
    m_in: float = 20

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        check_positive("beta", self.beta)
        if not self.m_in >= 1:
            raise InputError(f"m_in is {self.m_in}, but adaptation needs at least one point. Use m_in=1 or more.")


class TaskMoments(NamedTuple):
    """Moments of the task parameters θ, and the noise.

    Args:
        mean: E[θ], (..., d).
        second: E[θθᵀ], (..., d, d).
        noise: Variance σ² of the noise.

    Example:
        >>> TaskMoments.from_tasks(torch.tensor([[1.0], [3.0]]), noise=0.5).mean
        tensor([2.], dtype=torch.float64)
    """

    mean: Tensor
    second: Tensor
    noise: float

    @classmethod
    def from_environment(cls, environment: SharedRepresentation) -> TaskMoments:
        """Return the moments of the distribution of an environment's tasks.

        Args:
            environment: The environment.

        Returns:
            The moments, in float64.
        """
        mean = torch.zeros(environment.rank, dtype=torch.float64)
        if environment.mean is not None:
            mean += torch.tensor(environment.mean, dtype=torch.float64)
        second = torch.diag(torch.tensor(environment.variances, dtype=torch.float64)) + torch.outer(mean, mean)
        basis = environment.representation
        return cls(basis @ mean, basis @ second @ basis.mT, environment.noise)

    @classmethod
    def from_tasks(cls, theta: Tensor, noise: float) -> TaskMoments:
        """Return the moments of a finite set of tasks.

        Args:
            theta: Parameters θ of the tasks, (..., tasks, d).
            noise: Variance σ² of the noise.

        Returns:
            The moments, in float64.
        """
        theta = theta.double()
        return cls(theta.mean(-2), theta.mT @ theta / theta.shape[-2], noise)

    def errors(self, estimate: Tensor) -> tuple[Tensor, Tensor]:
        """Return the moments of the error e = estimate − θ.

        Args:
            estimate: An estimate of θ, the same for all tasks, (..., d).

        Returns:
            E[e], (..., d), and E[eeᵀ], (..., d, d).
        """
        mean = estimate - self.mean
        cross = _outer(estimate, self.mean)
        return mean, _outer(estimate, estimate) - cross - cross.mT + self.second

    def to(self, device: torch.device | str) -> TaskMoments:
        """Return the moments on a device.

        Args:
            device: The device.

        Returns:
            The moments.
        """
        return TaskMoments(self.mean.to(device), self.second.to(device), self.noise)


def stack_moments(moments: list[TaskMoments]) -> TaskMoments:
    """Stack the moments of several runs with the same noise along a new first axis.

    Args:
        moments: The moments of each run.

    Returns:
        The moments of all runs.

    Example:
        >>> moments = TaskMoments.from_tasks(torch.ones(4, 3), noise=0.5)
        >>> stack_moments([moments, moments]).mean.shape
        torch.Size([2, 3])
    """
    mean, second = (torch.stack(tensors) for tensors in zip(*((run.mean, run.second) for run in moments)))
    return TaskMoments(mean, second, moments[0].noise)


def initial_parameters(dimension: int, width: int, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw initial parameters (Yüksel et al. 2023, §5).

    Args:
        dimension: Dimension d of the inputs.
        width: Width k' of the hidden layer, at most d.
        alpha: Step size α of the inner loop.
        generator: Random generator.

    Returns:
        B₀ with random orthogonal columns and B₀ᵀB₀ = I/(4α), and w₀ in a random direction with ‖w₀‖² = αk'/100.

    Raises:
        InputError: If the hidden layer is wider than the inputs.

    Example:
        >>> B, w = initial_parameters(8, 4, 0.25, torch.Generator().manual_seed(0))
        >>> B.shape, w.shape
        (torch.Size([8, 4]), torch.Size([4]))
    """
    if width > dimension:
        raise InputError(
            f"width is {width}, but the inputs have {dimension} dimensions and the hidden layer must not be wider. "
            f"Use width={dimension}."
        )
    columns = torch.randn(dimension, width, generator=generator, dtype=torch.float64)
    direction = torch.randn(width, generator=generator, dtype=torch.float64)
    B = torch.linalg.qr(columns).Q / math.sqrt(4 * alpha)
    return B, math.sqrt(0.01 * width * alpha) * direction / direction.norm()


def adapted_head_moments(B: Tensor, w: Tensor, tasks: TaskMoments, settings: AnilSettings) -> tuple[Tensor, Tensor]:
    """Return E[wᵢ] and E[wᵢwᵢᵀ] of the heads after the inner step (Yüksel et al. 2023, eq. 7, lemma 15).

    The expectations are over tasks and their m points X. wᵢ = w − αBᵀ(Se − Xᵀz/m) with e = Bw − θ and S = XᵀX/m. For a
    symmetric matrix A, E[SAS] = A + (A + tr(A) I)/m. Unlike the published formula, the result also holds if E[θ] is not
    0.

    Args:
        B: Representation, (..., d, k').
        w: Head, (..., k').
        tasks: Moments of the tasks.
        settings: Settings of ANIL.

    Returns:
        E[wᵢ], (..., k'), and E[wᵢwᵢᵀ], (..., k', k').

    Example:
        >>> tasks = TaskMoments.from_tasks(torch.zeros(1, 2), noise=0.0)
        >>> B, w = torch.eye(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
        >>> adapted_head_moments(B, w, tasks, AnilSettings(alpha=0.5, m_in=math.inf))[0]
        tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    alpha, inverse_m = settings.alpha, 1 / settings.m_in
    error_mean, error_second = tasks.errors(_matvec(B, w))
    step_mean = alpha * _matvec(B.mT, error_mean)
    isotropic = inverse_m * (_trace(error_second) + tasks.noise)
    step_second = alpha**2 * (B.mT @ ((1 + inverse_m) * error_second @ B + isotropic[..., None, None] * B))
    cross = _outer(w, step_mean)
    return w - step_mean, _outer(w, w) - cross - cross.mT + step_second


def population_step(B: Tensor, w: Tensor, tasks: TaskMoments, settings: AnilSettings) -> tuple[Tensor, Tensor]:
    """Take one outer step of first-order ANIL on infinitely many tasks (Yüksel et al. 2023, eq. 5–7).

    If `tasks` is from `TaskMoments.from_tasks` and m_in = ∞, it is a step on those finitely many tasks, each with
    infinitely many points.

    Args:
        B: Representation, (..., d, k').
        w: Head, (..., k').
        tasks: Moments of the tasks.
        settings: Settings of ANIL.

    Returns:
        B and w after the step.

    Example:
        >>> environment = SharedRepresentation(dimension=8, variances=(1.0, 2.0))
        >>> B, w = initial_parameters(8, 8, 0.025, torch.Generator().manual_seed(0))
        >>> B, w = population_step(B, w, TaskMoments.from_environment(environment), AnilSettings())
        >>> B.shape, w.shape
        (torch.Size([8, 8]), torch.Size([8]))
    """
    head_mean, head_second = adapted_head_moments(B, w, tasks, settings)
    # E[θwᵢᵀ] = E[θ](w − αBᵀBw)ᵀ + αE[θθᵀ]B
    shrunk_w = w - settings.alpha * _matvec(B.mT, _matvec(B, w))
    theta_head = _outer(tasks.mean, shrunk_w) + settings.alpha * tasks.second @ B
    w_grad = _matvec(B.mT, _matvec(B, head_mean) - tasks.mean)
    return B - settings.beta * (B @ head_second - theta_head), w - settings.beta * w_grad


def limiting_gram(covariance: Tensor, noise: float, settings: AnilSettings) -> Tensor:
    """Return Λ*, the limit of B*ᵀBBᵀB* in training (Yüksel et al. 2023, eq. 8).

    Λ* = (1/α)(m/(m+1))(I − ((m+1)/σ̄² Σ* + I)⁻¹) with σ̄² = tr Σ* + σ². It is computed as
    (1/α)((1 + 1/m)Σ* + (σ̄²/m) I)⁻¹Σ*, which also holds for m = ∞.

    Args:
        covariance: Covariance Σ* of the tasks about their mean, in the basis B*, (..., k, k).
        noise: Variance σ² of the noise.
        settings: Settings of ANIL.

    Returns:
        Λ*, (..., k, k).

    Raises:
        InputError: If ANIL does not converge to this limit; see `check_convergence`.

    Example:
        >>> limiting_gram(torch.eye(1), 0.0, AnilSettings(alpha=0.5, m_in=2))
        tensor([[1.]])
    """
    check_convergence(covariance, settings)
    inverse_m = 1 / settings.m_in
    shift = inverse_m * (_trace(covariance) + noise)
    eye = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    scaled_limit: Tensor = torch.linalg.solve((1 + inverse_m) * covariance + shift[..., None, None] * eye, covariance)
    return scaled_limit / settings.alpha


def check_convergence(covariance: Tensor, settings: AnilSettings, width: int | None = None) -> None:
    """Raise InputError if first-order ANIL does not converge to the limit of Yüksel et al. 2023, theorem 1.

    Along an eigenvector of Σ* with eigenvalue s, a step multiplies the distance to the limit by 1 − 2αβs.

    Args:
        covariance: Covariance Σ* of the tasks, (..., k, k).
        settings: Settings of ANIL.
        width: Width k' of the hidden layer; None to leave it unchecked.

    Raises:
        InputError: If Σ* is singular, the hidden layer is too narrow, or a step size is too large.

    Example:
        >>> check_convergence(torch.eye(2), AnilSettings(), width=2)
    """
    eigenvalues = torch.linalg.eigvalsh(covariance)
    smallest, largest = float(eigenvalues.amin()), float(eigenvalues.amax())
    if smallest <= 1e-12 * largest or largest <= 0:
        raise InputError(
            f"covariance has the eigenvalue {smallest:.3g}, but theorem 1 needs tasks that differ in every direction "
            "of the representation. Remove the directions in which they are the same."
        )
    rank = covariance.shape[-1]
    if width is not None and width < rank:
        raise InputError(
            f"width is {width}, but the representation has {rank} dimensions and the hidden layer must not be "
            f"narrower. Use width={rank} or more."
        )
    if settings.beta > settings.alpha:
        raise InputError(
            f"beta is {settings.beta}, but theorem 1 needs a beta of at most alpha, which is {settings.alpha}. "
            f"Use beta={settings.alpha} or less."
        )
    product = settings.alpha * settings.beta * largest
    if product >= 1:
        raise InputError(
            f"alpha · beta · (largest eigenvalue of Σ*) is {product:.3g}, but the limit is stable only below 1. "
            "Use a smaller alpha or beta."
        )


def unlearning_bound(initial_value: float, steps: Tensor, total_variance: float, settings: AnilSettings) -> Tensor:
    """Return a bound on the largest squared singular value of B*⊥ᵀB in training (Yüksel et al. 2023, app. H).

    After t steps, the bound is 1/(1/initial_value + ct) with c = βα²σ̄²/m. Since E[wᵢwᵢᵀ] is at least (α²σ̄²/m) BᵀB, a
    step maps a squared singular value s² to at most s²(1 − cs²), as long as βE[wᵢwᵢᵀ] is below I. With m = ∞ the bound
    is constant.

    Args:
        initial_value: The largest squared singular value before training.
        steps: Numbers of steps t, in any shape.
        total_variance: σ̄² = tr Σ* + σ².
        settings: Settings of ANIL.

    Returns:
        The bound after each number of steps, in the shape of `steps`.

    Example:
        >>> unlearning_bound(10.0, torch.tensor([0, 1000]), 8.0, AnilSettings(alpha=0.1, beta=0.1, m_in=20))
        tensor([10.0000,  2.0000])
    """
    return 1 / (1 / initial_value + settings.beta * settings.alpha**2 * total_variance / settings.m_in * steps)


class Spectrum(NamedTuple):
    """Squared singular values of a representation in the true subspace and orthogonal to it (Yüksel et al. 2023, §5).

    Args:
        smallest: Smallest squared singular value of B*ᵀB, the part to be learned.
        largest: Largest squared singular value of B*ᵀB.
        orthogonal_mean: Mean of the squared singular values of B*⊥ᵀB, the part to be unlearned.
        orthogonal_largest: Largest squared singular value of B*⊥ᵀB.

    Example:
        >>> float(spectrum(2 * torch.eye(3), torch.eye(3)[:, :1]).largest)
        4.0
    """

    smallest: Tensor
    largest: Tensor
    orthogonal_mean: Tensor
    orthogonal_largest: Tensor


def spectrum(B: Tensor, basis: Tensor) -> Spectrum:
    """Return squared singular values of a representation in the true subspace and orthogonal to it.

    Args:
        B: The representation, (..., d, k').
        basis: The true representation B*, (..., d, k), with orthonormal columns.

    Returns:
        The smallest and largest in the column space of B*, and the mean and largest orthogonal to it.

    Example:
        >>> float(spectrum(2 * torch.eye(3), torch.eye(3)[:, :1]).orthogonal_mean)
        4.0
    """
    coordinates = basis.mT @ B
    orthogonal_part = B - basis @ coordinates
    in_subspace = torch.linalg.eigvalsh(coordinates @ coordinates.mT)
    orthogonal_gram = orthogonal_part @ orthogonal_part.mT
    orthogonal = torch.linalg.eigvalsh(orthogonal_gram)
    directions = min(B.shape[-2] - basis.shape[-1], B.shape[-1])
    orthogonal_mean = _trace(orthogonal_gram) / directions
    return Spectrum(in_subspace[..., 0], in_subspace[..., -1], orthogonal_mean, orthogonal[..., -1])


def _outer(a: Tensor, b: Tensor) -> Tensor:
    return a[..., :, None] * b[..., None, :]


def _matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector[..., None])[..., 0]


def _trace(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1).sum(-1)
