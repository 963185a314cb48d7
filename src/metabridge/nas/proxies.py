"""Proxies for the accuracy of an untrained network: kernel conditioning and linear regions (Wang et al. 2022, sec. 5).

A proxy that cannot be computed reliably returns a `ProxyScore` with the reason in `failure`. In rankings, failed
proxies come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.kernels.kernel_systems import condition_number
from metabridge.kernels.meta_kernels import AdaptedPart, block_diagonal_product, query_residual_operator

KernelName = Literal["maml", "anil", "ntk"]

_ADAPTED_PART: dict[KernelName, AdaptedPart] = {"maml": "all", "anil": "head"}
NOT_FINITE = "the network's outputs are NaN or infinite"
_KERNEL_NOT_FINITE = "the kernel has values that are NaN or infinite"
_INPUT_ENTRIES_PER_PASS = 2**21  # `count_linear_regions` splits larger batches, to save memory
_BREAK_AT_ZERO, _BREAK_AT_BOTH_LIMITS = (  # piecewise linear operations, by where their slope changes
    {getattr(torch.ops.aten, name).default for name in names}
    for names in (("relu", "relu_", "leaky_relu", "leaky_relu_", "_prelu_kernel"), ("hardtanh", "hardtanh_"))
)


@dataclass(frozen=True)
class ProxyScore:
    """The value of a proxy, or the reason why it could not be computed reliably.

    Args:
        value: The value; NaN or infinite only if the proxy failed.
        failure: Why the proxy failed, or None if it did not. If the value is NaN or infinite, it is never None.

    >>> ProxyScore(2.0)
    ProxyScore(value=2.0, failure=None)
    >>> ProxyScore(float("inf")).failure
    'the value is inf'
    """

    value: float
    failure: str | None = None

    def __post_init__(self) -> None:
        if self.failure is None and not math.isfinite(self.value):
            object.__setattr__(self, "failure", f"the value is {self.value}")


def mean_score(scores: Sequence[ProxyScore]) -> ProxyScore:
    """Return the mean over repeats, or the first failure if any of them failed.

    Args:
        scores: At least one score.

    Returns:
        The mean, or NaN with the reason.

    >>> mean_score([ProxyScore(2.0), ProxyScore(4.0)])
    ProxyScore(value=3.0, failure=None)
    >>> mean_score([ProxyScore(2.0), ProxyScore(math.inf, "the smallest eigenvalue is lost in rounding")]).failure
    'the smallest eigenvalue is lost in rounding'
    """
    failure = next((score.failure for score in scores if score.failure is not None), None)
    return ProxyScore(math.nan if failure else sum(score.value for score in scores) / len(scores), failure)


class KernelMatrices(NamedTuple):
    """The NTK matrix Θ and the NNGP matrix K (or None), with one row per image in the order of `all_images`."""

    ntk: Tensor
    nngp: Tensor | None


@dataclass(frozen=True)
class ConditionNumber:
    """The condition number σ_max/σ_min of a kernel of a network (Wang et al. 2022, eq. 14); lower is better.

    The kernel is computed at the current parameters of the network, from gradients of its summed outputs.

    Args:
        kernel: "maml" or "anil" for the MetaNTK between the queries of all tasks, the NTK of a network that first
            adapts to each task's support set (Wang et al. 2022, eq. 106 and 112); "ntk" for the NTK of all images,
            without adaptation, as in TE-NAS.
        time: Adaptation time λτ of the MetaNTK (learning rate times number of steps), or inf for convergence.
        ridge: Number added to the diagonal of the kernel matrices that the MetaNTK inverts.

    Raises:
        InputError: If an argument is out of range.

    >>> from metabridge.datasets import load
    >>> from metabridge.models import mlp
    >>> tasks = load("glyphs").tasks("train", shots=1, queries=1).sample(3, torch.Generator().manual_seed(0))
    >>> ConditionNumber("maml")(mlp(28 * 28, 5), tasks).value > 1
    True
    """

    kernel: KernelName = "maml"
    time: float = math.inf
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        if self.kernel not in get_args(KernelName):
            names = ", ".join(map(repr, get_args(KernelName)))
            raise InputError(f"kernel is {self.kernel!r}, but must be one of {names}.")
        if not self.time > 0:
            raise InputError(f"time is {self.time}, but λτ must be positive; inf stands for adaptation to convergence.")
        if not (math.isfinite(self.ridge) and self.ridge >= 0):
            raise InputError(f"ridge is {self.ridge}, but must be 0 or a positive number.")

    def __call__(self, net: nn.Module, tasks: Episodes) -> ProxyScore:
        """Return the condition number on some tasks.

        Args:
            net: Any module that maps a batch of images to a batch of output vectors.
            tasks: Tasks with support and query images.

        Returns:
            The condition number, or why it failed: the outputs or the kernel are not finite, its smallest eigenvalue
            is lost in rounding, or two support images have the same kernel values.
        """
        x = all_images(tasks)
        with torch.no_grad():
            if not _is_finite(net(x)):
                return ProxyScore(math.nan, NOT_FINITE)
        return self.from_matrices(self.kernel_matrices(net, x), len(tasks), tasks.query_x.shape[1])

    def kernel_matrices(self, net: nn.Module, x: Tensor) -> KernelMatrices:
        """Return the kernel matrices that the condition number is computed from.

        Args:
            net: Any module that maps a batch of images to a batch of output vectors.
            x: Images, (n, ...).

        Returns:
            The NTK matrix, and for "anil" the NNGP matrix too.
        """
        kernel = EmpiricalKernel(net, outputs="sum")
        return KernelMatrices(kernel.ntk(x), kernel.nngp(x) if self.kernel == "anil" else None)

    def from_matrices(self, matrices: KernelMatrices, tasks: int, queries: int) -> ProxyScore:
        """Return the condition number from kernel matrices that are already computed.

        The condition number is computed in double precision. Whether its smallest eigenvalue counts as lost in rounding
        depends on the precision of `matrices`.

        Args:
            matrices: Kernel matrices at the images of all tasks, in the order of `all_images`.
            tasks: Number of tasks.
            queries: Number of query images per task.

        Returns:
            The condition number, or why it failed.
        """
        eps = torch.finfo(matrices.ntk.dtype).eps
        nngp = None if matrices.nngp is None else _to_double(matrices.nngp)
        kernel = _PrecomputedKernel(_to_double(matrices.ntk), nngp)
        if not all(_is_finite(matrix) for matrix in (kernel.theta, kernel.k) if matrix is not None):
            return ProxyScore(math.nan, _KERNEL_NOT_FINITE)
        if self.kernel == "ntk":
            return condition_number_score(kernel.theta, eps)
        try:
            return self._meta_ntk_score(kernel, torch.arange(len(kernel.theta)).view(tasks, -1), queries, eps)
        except InputError as error:  # two support images have the same kernel values
            return ProxyScore(math.inf, str(error))

    def _meta_ntk_score(self, kernel: _PrecomputedKernel, indices: Tensor, queries: int, eps: float) -> ProxyScore:
        """Return the condition number of the MetaNTK Φ = RΘRᵀ.

        For each task, R = `query_residual_operator` maps the residuals of its images before adaptation to those of its
        queries after adaptation. Rounding of Θ changes Φ by up to eps σ_max(Θ) ‖R‖², however small Φ is.
        """
        query_support = indices[:, :queries], indices[:, queries:]
        operator = query_residual_operator(
            kernel, *query_support, _ADAPTED_PART[self.kernel], self.time, self.ridge, eps
        )
        phi = block_diagonal_product(operator, kernel.theta, operator)
        theta_norm, phi_norm = (float(torch.linalg.matrix_norm(matrix, 2)) for matrix in (kernel.theta, phi))
        error = eps * theta_norm * float(torch.linalg.matrix_norm(operator, 2).max()) ** 2
        return condition_number_score(phi, error / phi_norm if phi_norm else math.inf)


@dataclass(frozen=True, eq=False)
class _PrecomputedKernel:
    """A kernel whose matrices at some images are already computed. Its arguments are indices of these images."""

    theta: Tensor
    k: Tensor | None

    def ntk(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        return self.theta[x][:, x if z is None else z]

    def nngp(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        assert self.k is not None
        return self.k[x][:, x if z is None else z]

    def both(self, x: Tensor, z: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.ntk(x, z), self.nngp(x, z)


def _to_double(matrix: Tensor) -> Tensor:
    return matrix.detach().double().cpu()


def all_images(tasks: Episodes) -> Tensor:
    """Return the images of all tasks in one batch, task by task, each task with its queries before its support set.

    Args:
        tasks: Tasks with support and query images.

    Returns:
        The images (tasks · (queries + supports), ...).

    >>> tasks = Episodes(torch.zeros(2, 1, 3), torch.zeros(2, 1, 1), torch.ones(2, 1, 3), torch.zeros(2, 1, 1))
    >>> all_images(tasks)[:, 0]
    tensor([1., 0., 1., 0.])
    """
    return torch.cat([tasks.query_x, tasks.support_x], 1).flatten(0, 1)


def condition_number_score(matrix: Tensor, eps: float) -> ProxyScore:
    """Return σ_max/σ_min of a positive semi-definite matrix, or a failure if σ_min may be a rounding error.

    Args:
        matrix: A positive semi-definite matrix (n, n).
        eps: Error of the entries, divided by the largest eigenvalue.

    Returns:
        The condition number, or why it failed.

    >>> condition_number_score(torch.diag(torch.tensor([1.0, 4.0])), eps=1e-7)
    ProxyScore(value=4.0, failure=None)
    >>> condition_number_score(torch.ones(2, 2), eps=1e-7).failure
    'the smallest of 2 eigenvalues is lost in rounding'
    """
    if not _is_finite(matrix):
        return ProxyScore(math.nan, _KERNEL_NOT_FINITE)
    value = condition_number(matrix, eps=eps)
    if math.isinf(value):
        return ProxyScore(value, f"the smallest of {len(matrix)} eigenvalues is lost in rounding")
    return ProxyScore(value)


@torch.no_grad()
def count_linear_regions(net: nn.Module, inputs: Tensor) -> ProxyScore:
    """Count the linear regions of `net` that contain at least one of the inputs (Wang et al. 2022, eq. 15).

    Two inputs are in the same region if the input of every ReLU has the same sign for both. LeakyReLU and PReLU count
    like ReLU. For ReLU6 and Hardtanh, both values at which their slope changes count.

    Args:
        net: A network without batch norms that depend on the batch.
        inputs: A batch of inputs.

    Returns:
        The number of regions, or why it failed: there is no ReLU, or the outputs are not finite.

    Raises:
        InputError: If `inputs` is empty, or a batch norm uses the statistics of the batch.

    >>> count_linear_regions(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(5, 2))
    ProxyScore(value=1.0, failure=None)
    """
    if not len(inputs):
        raise InputError("inputs is empty. Give at least one input.")
    for name, layer in net.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None):
            raise InputError(
                f"batch norm {name!r} normalizes over the batch, so the region of an input depends on other inputs. "
                "Use net.eval(), or metabridge.models.with_group_norm(net)."
            )
    patterns: set[bytes] = set()
    for chunk in inputs.split(max(1, _INPUT_ENTRIES_PER_PASS // inputs[0].numel())):
        with _ActivationPatterns() as recorder:
            outputs = net(chunk)
        if not recorder.patterns:
            return ProxyScore(math.nan, "the network has no ReLU, so it has no linear regions to count")
        if not _is_finite(outputs):
            return ProxyScore(math.nan, NOT_FINITE)
        patterns.update(_pack_rows(recorder.patterns))
    return ProxyScore(float(len(patterns)))


def _is_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _breakpoints(func: Callable[..., Any], args: Sequence[float]) -> Sequence[float]:
    """Return where the slope of a piecewise linear operation changes, and () for any other operation.

    `args` are the arguments of the operation after its input.
    """
    if func in _BREAK_AT_ZERO:
        return (0.0,)
    if func in _BREAK_AT_BOTH_LIMITS:
        return (*args, *(-1.0, 1.0)[len(args) :])  # the default limits of hardtanh are −1 and 1
    return ()


class _ActivationPatterns(TorchDispatchMode):
    """Records whether the inputs of piecewise linear operations are above each breakpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.patterns: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.patterns += [(args[0] > threshold).flatten(1) for threshold in _breakpoints(func, args[1:])]
        return func(*args, **(kwargs or {}))


def _pack_rows(patterns: list[Tensor]) -> Iterator[bytes]:
    """Yield the pattern of each input, with eight signs in each byte."""
    bits = torch.cat(patterns, 1)
    bits = nn.functional.pad(bits, (0, -bits.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
    packed = (bits * weights).sum(-1, dtype=torch.uint8)
    return map(bytes, packed.cpu().numpy())
