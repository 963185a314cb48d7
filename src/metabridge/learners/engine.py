"""Engines: the same outer gradient over a loop, threads, `vmap` or a captured CUDA graph.

Every method's meta-gradient is a mean over tasks, so an engine only decides how the tasks are
laid out on the machine. All of them give the same numbers. The exception proves it: where batch
norm mixes the tasks (running statistics, in training), they stay together in every mode.

Buffers that a forward pass changes in training are the same for every task of a step. After the step,
one forward pass for each task's support set changes them, in the order of the tasks.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metabridge.cuda_graph import CapturedGraph
from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.double_backward import second_derivatives
from metabridge.learners.method import Method
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.learners.parameters import check
from metabridge.learners.task_gradients import summed_gradient
from metabridge.models.batch_norm import running_batch_norms
from metabridge.models.forward_behaviour import Behaviour, observe
from metabridge.models.network import Network, Params, body_params, update_buffers
from metabridge.threads import map_over_threads

log = logging.getLogger("metabridge")

Mode = Literal["auto", "loop", "workers", "vectorised", "captured"]
CAPTURES = 8  # so many forms of batches are kept recorded; each takes memory of its own


class MetaGradient(NamedTuple):
    """The mean outer loss of a batch of tasks and its gradient by parameter name."""

    loss: Tensor
    gradients: Params

    def assign(self, params: Params) -> None:
        """Hand the gradients to `params`, where an optimizer finds them."""
        for name, gradient in self.gradients.items():
            params[name].grad = gradient


class Engine:
    """Computes meta-gradients of one method on one network, batch after batch.

    `mode` says how tasks are laid out: "loop" one after the other, "workers" on one thread a core,
    "vectorised" all at once under `vmap`, "captured" the same as a CUDA graph that is recorded once
    for every form of batch and replayed; "auto" takes "captured" on a GPU and "workers" elsewhere.
    `flat` computes exact second-order gradients with memory that does not grow with the inner steps.
    `dtype` is what the features are computed in, such as `torch.bfloat16`; parameters and gradients
    keep their own.

    On a GPU the gradients of a captured step are overwritten by the next one.

    >>> from metabridge.environments import Sinusoid
    >>> from metabridge.learners import method, parameters
    >>> from metabridge.models import mlp
    >>> maml, net = method("maml"), mlp(1, 1)
    >>> params = parameters(maml, net)
    >>> episodes = Sinusoid().sample(4, torch.Generator().manual_seed(0))
    >>> sorted(Engine(maml, net)(params, episodes).gradients) == sorted(params)
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
        self._checked: set[tuple[object, ...]] = set()
        self._behaviour: dict[tuple[object, ...], Behaviour] = {}  # of the network, by the form of the batch
        self._captures: dict[tuple[object, ...], _Capture] = {}
        self._places: tuple[int, ...] = ()  # of the parameters that the captures read
        self._uncapturable = False

    def __call__(self, params: Params, episodes: Episodes) -> MetaGradient:
        """Return the mean outer loss of the tasks and its gradient."""
        if torch.is_inference_mode_enabled():
            raise InputError("torch.inference_mode() is on, in which there are no gradients. Train outside of it.")
        form = self._form(episodes)
        if episodes.device.type == "cpu" or form not in self._checked:  # looking at a GPU's labels would stall it
            check(self.method, self.net, params, episodes, dtype=self.dtype)
            self._checked.add(form)
        behaviour = self.behaviour(params, episodes)
        if self.flat and self.method.adapts == "all" and behaviour.random:
            raise InputError(
                "flat runs every inner step twice, but this network drops at random in training, or draws other random "
                "numbers, and would draw different ones the second time. Use flat=False, or net.eval()."
            )
        if not self.method.split:
            episodes = episodes.without_split()
        result = self._computed(params, episodes, behaviour)
        if behaviour.changes_buffers:
            for x in episodes.support_x:
                update_buffers(self.net, params, x)
        return result

    def behaviour(self, params: Params, episodes: Episodes) -> Behaviour:
        """Return what the network does in a forward pass on points of these episodes, in its present mode."""
        form = self._form(episodes)
        if form not in self._behaviour:
            points = max(2, episodes.support_x.shape[1])  # a task's; of tasks with a single point two
            x = episodes.support_x.flatten(0, 1)[:points]
            self._behaviour[form] = observe(self.net.features, x, body_params(params))
        return self._behaviour[form]

    def _form(self, episodes: Episodes) -> tuple[object, ...]:
        modes = tuple(layer.training for layer in self.net.modules())
        return (modes, episodes.device, *(tensor.shape for tensor in episodes.tensors()))

    def _computed(self, params: Params, episodes: Episodes, behaviour: Behaviour) -> MetaGradient:
        mode = self.mode
        if mode == "auto":
            mode = "captured" if episodes.device.type == "cuda" else "workers"
        if mode == "workers" and behaviour.random:
            mode = "loop"  # threads would draw from one generator in an order that no seed decides
        if mode in ("loop", "workers") and self._mixes_tasks():
            mode = "vectorised"
        summed = partial(self._sum, behaviour, params)

        def all_at_once(episodes: Episodes) -> MetaGradient:
            return self._mean(params, len(episodes), *summed(episodes))

        if mode == "captured":
            return self._replayed(params, episodes, all_at_once)
        if mode == "vectorised":
            return all_at_once(episodes)
        tasks = [episodes[task] for task in range(len(episodes))]
        each = map_over_threads(summed, tasks) if mode == "workers" else map(summed, tasks)
        return self._mean(params, len(tasks), *_total(each))

    def _mixes_tasks(self) -> bool:
        """Whether the body's batch norm sees all tasks in one batch, so that they cannot be parted."""
        return self.method.adapts != "all" and self.net.training and bool(running_batch_norms(self.net))

    def _sum(self, behaviour: Behaviour, params: Params, episodes: Episodes) -> tuple[Tensor, Params]:
        twice = self.method.adapts == "all" and OUTER_RULES[self.method.outer].second_order
        with second_derivatives(weight_norm=behaviour.weight_norm) if twice else contextlib.nullcontext():
            try:
                return summed_gradient(self.method, self.net, params, episodes, flat=self.flat, dtype=self.dtype)
            except NotImplementedError as error:
                if not twice:
                    raise
                raise InputError(
                    f"the network cannot be differentiated twice, as this method does: {str(error).rstrip('.')}. Use "
                    "outer='first-order', as method('fo-maml') has, or other layers."
                ) from error

    def _mean(self, params: Params, tasks: int, loss: Tensor, total: Params) -> MetaGradient:
        loss, gradients = loss / tasks, dict(zip(total, torch._foreach_div(list(total.values()), tasks)))
        if self.method.regulariser is not None:
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            with torch.enable_grad():
                term = self.method.regulariser(leaves)
            slopes = torch.autograd.grad(term, [leaves[name] for name in gradients], materialize_grads=True)
            loss = loss + term.detach()
            gradients = {name: value + slope for (name, value), slope in zip(gradients.items(), slopes)}
        return MetaGradient(loss, gradients)

    def _replayed(
        self, params: Params, episodes: Episodes, compute: Callable[[Episodes], MetaGradient]
    ) -> MetaGradient:
        if episodes.device.type != "cuda" or self._uncapturable:
            return compute(episodes)
        places = tuple(value.data_ptr() for value in params.values())
        form = (self.net.training, *((tensor.shape, tensor.dtype) for tensor in episodes.tensors()))
        if places != self._places or (form not in self._captures and len(self._captures) == CAPTURES):
            self._captures.clear()  # frees their memory before the next one takes its own
            self._places = places
        if form not in self._captures:
            try:
                self._captures[form] = _Capture(compute, episodes)
            except RuntimeError as error:
                log.warning("this step cannot be captured as a CUDA graph and runs eagerly: %s", error)
                self._uncapturable = True
                return compute(episodes)
        return self._captures[form].replay(episodes)


class _Capture:
    """A meta-step recorded once, with episodes of its own to read."""

    def __init__(self, compute: Callable[[Episodes], MetaGradient], episodes: Episodes) -> None:
        self.episodes = episodes.clone()
        self.recording = CapturedGraph(lambda: compute(self.episodes))

    def replay(self, episodes: Episodes) -> MetaGradient:
        for mine, given in zip(self.episodes.tensors(), episodes.tensors()):
            mine.copy_(given, non_blocking=True)
        return self.recording.replay()


def _total(each: Iterable[tuple[Tensor, Params]]) -> tuple[Tensor, Params]:
    """Sum losses and gradients in the order in which they come.

    Only into tensors that are made here: autograd may return one tensor as the gradient of two parameters.
    """
    losses: list[Tensor] = []
    names: list[str] = []
    total: list[Tensor] = []
    for loss, gradients in each:
        losses.append(loss)
        names, more = list(gradients), list(gradients.values())
        if len(losses) == 1:
            total = more
        elif len(losses) == 2:
            total = list(torch._foreach_add(total, more))
        else:
            torch._foreach_add_(total, more)
    return torch.stack(losses).sum(), dict(zip(names, total))


def meta_gradient(
    method: Method, net: Network, params: Params, episodes: Episodes, *, mode: Mode = "auto", flat: bool = False
) -> MetaGradient:
    """Return the mean outer loss of the tasks and its gradient, once; see `Engine` for batch after batch."""
    if episodes.device.type == "cuda" and mode in ("auto", "captured"):
        mode = "vectorised"  # a capture pays from its second batch on
    return Engine(method, net, mode=mode, flat=flat)(params, episodes)
