"""Compute meta-gradients in a loop, in threads, with `vmap` or with a captured CUDA graph.

A meta-gradient is a mean over tasks, and the mode of an `Engine` decides how the tasks are computed. All modes return
the same result up to rounding, unless the network draws random numbers. If batch norm computes its statistics over all
tasks of a step, every mode computes the tasks in one batch.

If forward passes in training change buffers, all tasks of a step start from the same buffers. After the step, one
forward pass on the support set of each task, in the order of the tasks, updates the buffers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, assert_never, get_args

import torch
from torch import Tensor

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.double_backward import second_derivatives
from metabridge.learners.method import Method
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.learners.parameters import check_training, network_name
from metabridge.learners.task_gradients import summed_gradient
from metabridge.models.batch_norm import running_batch_norms
from metabridge.models.forward_behavior import Behavior, observe
from metabridge.models.network import Network, Params, body_params, update_buffers
from metabridge.threads import map_over_threads

log = logging.getLogger("metabridge")

Mode = Literal["auto", "loop", "workers", "vectorized", "captured"]
MAX_CAPTURES = 8  # maximum number of CUDA graphs, one per batch shape; each allocates memory


class MetaGradient(NamedTuple):
    """The mean outer loss of a batch of tasks, and its gradient.

    Args:
        loss: The outer loss, a scalar tensor: the mean over tasks of the loss on the query set, after the inner solve
            (if there is one), plus the value of the method's regularizer.
        gradients: The gradient of each trained parameter, by name.

    >>> gradient = MetaGradient(torch.tensor(0.5), {"head.bias": torch.ones(2)})
    >>> gradient
    MetaGradient(loss=0.5, gradients of 1 parameter)
    >>> params = {"head.bias": torch.zeros(2, requires_grad=True)}
    >>> gradient.assign(params)
    >>> params["head.bias"].grad
    tensor([1., 1.])
    """

    loss: Tensor
    gradients: Params

    def assign(self, params: Params) -> None:
        """Set `grad` of the trained parameters, for an optimizer.

        Args:
            params: The method's parameters, from `parameters`.
        """
        for name, gradient in self.gradients.items():
            params[name].grad = gradient

    def __repr__(self) -> str:
        count = len(self.gradients)
        return f"MetaGradient(loss={float(self.loss):.4g}, gradients of {count} parameter{'s' if count != 1 else ''})"


class Engine:
    """Computes meta-gradients of one method on one network, batch after batch.

    Call it with parameters and episodes. In the mode "captured", each step overwrites the gradients of the step before.

    Args:
        method: The few-shot learning method.
        net: The network that it trains.
        mode: How tasks are computed: "loop", one after the other; "workers", on one thread per core; "vectorized", all
            at once under `vmap`; or "captured", vectorized and captured as a CUDA graph, one per batch shape. "auto"
            means "captured" on a GPU and "workers" on a CPU. If the network draws random numbers, "loop" replaces
            "workers". Without a GPU, "vectorized" replaces "captured".
        flat: Whether to store only the parameters after each inner step and recompute the steps in the backward pass,
            so that memory hardly grows with the number of steps. Only exact outer gradients use it.
        dtype: Data type in which features are computed, such as `torch.bfloat16`. Parameters and gradients keep their
            data types.

    Raises:
        InputError: If `mode` is unknown; when called, if parameters, network and episodes do not match.

    >>> import torch
    >>> import metabridge as mb
    >>> maml, net = mb.method("maml"), mb.models.mlp(1, 1)
    >>> params = mb.parameters(maml, net)
    >>> episodes = mb.environments.Sinusoid().sample(4, torch.Generator().manual_seed(0))
    >>> engine = mb.Engine(maml, net)
    >>> engine
    Engine(mlp, mode='auto')
    >>> sorted(engine(params, episodes).gradients) == sorted(params)
    True
    """

    def __init__(
        self,
        method: Method,
        net: Network,
        *,
        mode: Mode = "auto",
        flat: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise InputError(f"mode is {mode!r}, but must be one of {', '.join(map(repr, get_args(Mode)))}.")
        self.method, self.net, self.mode, self.flat, self.dtype = method, net, mode, flat, dtype
        self._checked: set[tuple[object, ...]] = set()  # signatures of the batches that were checked
        self._behavior: dict[tuple[object, ...], Behavior] = {}  # behavior of the network, by signature
        self._captures: dict[tuple[object, ...], _Capture] = {}
        self._captured_addresses: tuple[int, ...] = ()  # of the parameters that the captures read
        self._uncapturable = False  # whether a capture failed

    def __call__(self, params: Params, episodes: Episodes) -> MetaGradient:
        """Return the mean outer loss of the tasks and its gradient.

        Args:
            params: The method's parameters, from `parameters`.
            episodes: The tasks.

        Returns:
            The loss and the gradients of the trained parameters.
        """
        if torch.is_inference_mode_enabled():
            raise InputError("torch.inference_mode() is on, which allows no gradients. Train outside of it.")
        signature = self._signature(episodes)
        # on a GPU, check each signature only once, since reading labels waits for the GPU
        if episodes.device.type == "cpu" or signature not in self._checked:
            check_training(self.method, self.net, params, episodes, dtype=self.dtype)
            self._checked.add(signature)
        behavior = self.behavior(params, episodes)
        if self.flat and self.method.adapts == "all" and behavior.is_random:
            raise InputError(
                "flat computes every inner step twice, but this network draws random numbers (dropout), which would "
                "differ the second time. Use flat=False, or net.eval()."
            )
        if not self.method.split:
            episodes = episodes.without_split()
        result = self._compute(params, episodes, behavior)
        if behavior.changes_buffers:
            for x in episodes.support_x:
                update_buffers(self.net, params, x)
        return result

    def behavior(self, params: Params, episodes: Episodes) -> Behavior:
        """Return what a forward pass of the network does in its current mode (training or evaluation).

        Args:
            params: The method's parameters, from `parameters`.
            episodes: The tasks. Some of their inputs are passed through the network.

        Returns:
            Whether the forward pass draws random numbers, uses fused weight normalization and changes buffers.
        """
        signature = self._signature(episodes)
        if signature not in self._behavior:
            count = max(2, episodes.support_x.shape[1])  # at least two inputs, for batch norm
            x = episodes.support_x.flatten(0, 1)[:count]
            self._behavior[signature] = observe(self.net.features, x, body_params(params))
        return self._behavior[signature]

    def __repr__(self) -> str:
        options = f", mode={self.mode!r}" + (", flat=True" if self.flat else "")
        return f"Engine({network_name(self.net)}{options}{'' if self.dtype is None else f', dtype={self.dtype}'})"

    def _signature(self, episodes: Episodes) -> tuple[object, ...]:
        """Return a key of a batch. The network is observed, and on a GPU the batch is checked, only once per key."""
        training = tuple(layer.training for layer in self.net.modules())
        return (training, episodes.device, *(tensor.shape for tensor in episodes.tensors()))

    def _compute(self, params: Params, episodes: Episodes, behavior: Behavior) -> MetaGradient:
        mode = self.mode
        if mode == "auto":
            mode = "captured" if episodes.device.type == "cuda" else "workers"
        if mode == "workers" and behavior.is_random:
            mode = "loop"  # the order in which threads draw from the shared random generator is not reproducible
        if mode in ("loop", "workers") and self._mixes_tasks():
            mode = "vectorized"
        sum_over_tasks = partial(self._sum, behavior, params)

        def compute_at_once(episodes: Episodes) -> MetaGradient:
            return self._mean(params, len(episodes), *sum_over_tasks(episodes))

        if mode == "captured":
            return self._replay(params, episodes, compute_at_once)
        if mode == "vectorized":
            return compute_at_once(episodes)
        tasks = [episodes[task] for task in range(len(episodes))]
        if mode == "workers":
            return self._mean(params, len(tasks), *_sum_in_order(map_over_threads(sum_over_tasks, tasks)))
        if mode == "loop":
            return self._mean(params, len(tasks), *_sum_in_order(map(sum_over_tasks, tasks)))
        assert_never(mode)

    def _mixes_tasks(self) -> bool:
        """Return whether batch norm computes its statistics over all tasks, which must then be in one batch."""
        return self.method.adapts != "all" and self.net.training and bool(running_batch_norms(self.net))

    def _sum(self, behavior: Behavior, params: Params, episodes: Episodes) -> tuple[Tensor, Params]:
        """Return the loss and the gradient summed over tasks."""
        second_order = self.method.adapts == "all" and OUTER_RULES[self.method.outer].second_order
        with second_derivatives(weight_norm=behavior.uses_weight_norm) if second_order else contextlib.nullcontext():
            try:
                return summed_gradient(self.method, self.net, params, episodes, flat=self.flat, dtype=self.dtype)
            except NotImplementedError as error:
                if not second_order:
                    raise
                raise InputError(
                    f"the network cannot be differentiated twice, as this method does: {str(error).rstrip('.')}. Use "
                    "outer='first-order', as method('fo-maml') has, or other layers."
                ) from error

    def _mean(self, params: Params, num_tasks: int, loss_sum: Tensor, sums: Params) -> MetaGradient:
        """Return the mean over tasks from the summed loss and the summed gradients, plus the regularizer."""
        loss, gradients = loss_sum / num_tasks, dict(zip(sums, torch._foreach_div(list(sums.values()), num_tasks)))
        if self.method.regularizer is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            with torch.enable_grad():
                penalty = self.method.regularizer(leaves)
            penalty_grads = torch.autograd.grad(penalty, [leaves[name] for name in gradients], materialize_grads=True)
            loss = loss + penalty.detach()
            gradients = {name: value + grad for (name, value), grad in zip(gradients.items(), penalty_grads)}
        return MetaGradient(loss, gradients)

    def _replay(self, params: Params, episodes: Episodes, compute: Callable[[Episodes], MetaGradient]) -> MetaGradient:
        """Return `compute(episodes)`, computed by a CUDA graph if possible."""
        if episodes.device.type != "cuda" or self._uncapturable:
            return compute(episodes)
        addresses = tuple(value.data_ptr() for value in params.values())
        key = (self.net.training, *((tensor.shape, tensor.dtype) for tensor in episodes.tensors()))
        is_full = key not in self._captures and len(self._captures) == MAX_CAPTURES
        if addresses != self._captured_addresses or is_full:
            self._captures.clear()  # frees their memory before the next capture allocates more
            self._captured_addresses = addresses
        if key not in self._captures:
            try:
                self._captures[key] = _Capture(compute, episodes)
            except RuntimeError as error:
                log.warning("this step cannot be captured as a CUDA graph and runs eagerly: %s", error)
                self._uncapturable = True
                return compute(episodes)
        return self._captures[key].replay(episodes)


class _Capture:
    """A meta-gradient captured as a CUDA graph, which reads a copy of the episodes."""

    def __init__(self, compute: Callable[[Episodes], MetaGradient], episodes: Episodes) -> None:
        self.episodes = episodes.clone()
        self.graph = CapturedGraph(lambda: compute(self.episodes))

    def replay(self, episodes: Episodes) -> MetaGradient:
        """Copy the episodes into the tensors that the graph reads, and run it."""
        for copy, tensor in zip(self.episodes.tensors(), episodes.tensors()):
            copy.copy_(tensor, non_blocking=True)
        return self.graph.replay()


def _sum_in_order(results: Iterable[tuple[Tensor, Params]]) -> tuple[Tensor, Params]:
    """Sum the losses and the gradients of all tasks, in the order of the tasks.

    The first sum creates new tensors, since autograd may return one tensor as the gradient of two parameters.
    """
    losses: list[Tensor] = []
    names: list[str] = []
    sums: list[Tensor] = []
    for loss, gradients in results:
        losses.append(loss)
        names, values = list(gradients), list(gradients.values())
        if len(losses) == 1:
            sums = values
        elif len(losses) == 2:
            sums = list(torch._foreach_add(sums, values))
        else:
            torch._foreach_add_(sums, values)
    return torch.stack(losses).sum(), dict(zip(names, sums))


def meta_gradient(
    method: Method, net: Network, params: Params, episodes: Episodes, *, mode: Mode = "auto", flat: bool = False
) -> MetaGradient:
    """Return the mean outer loss of the tasks and its gradient. For many batches, use `Engine`.

    Args:
        method: The few-shot learning method.
        net: The network that it trains.
        params: The method's parameters, from `parameters`.
        episodes: The tasks.
        mode: How tasks are computed; see `Engine`. On a GPU, "vectorized" replaces "auto" and "captured".
        flat: Whether to store only the parameters after each inner step and recompute the steps in the backward pass,
            so that memory hardly grows with the number of steps. Only exact outer gradients use it.

    Returns:
        The loss and the gradients of the trained parameters.

    Raises:
        InputError: If `mode` is unknown, or parameters, network and episodes do not match.

    >>> import torch
    >>> import metabridge as mb
    >>> anil, net = mb.method("anil"), mb.models.mlp(1, 1)
    >>> episodes = mb.environments.Sinusoid().sample(4, torch.Generator().manual_seed(0))
    >>> mb.meta_gradient(anil, net, mb.parameters(anil, net), episodes).gradients["head.bias"].shape
    torch.Size([1])
    """
    if episodes.device.type == "cuda" and mode in ("auto", "captured"):
        mode = "vectorized"  # capturing a graph pays off only from the second batch on
    return Engine(method, net, mode=mode, flat=flat)(params, episodes)
