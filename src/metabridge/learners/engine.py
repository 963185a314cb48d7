"""Engines: the same outer gradient over a loop, threads, `vmap` or a captured CUDA graph.

Every method's meta-gradient is a mean over tasks, so an engine only decides how the tasks are
laid out on the machine. All of them give the same numbers. The exception proves it: where batch
norm mixes the tasks (running statistics, in training), they stay together in every mode.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.errors import InputError
from metabridge.learners.gradient import summed_gradient
from metabridge.learners.method import Method
from metabridge.learners.parameters import check
from metabridge.learners.workers import over_cores
from metabridge.models.drop import draws
from metabridge.models.network import Network, Params
from metabridge.models.norm import running_layers
from metabridge.recording import Recording

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
        self._captures: dict[tuple[object, ...], _Capture] = {}
        self._places: tuple[int, ...] = ()  # of the parameters that the captures read
        self._uncapturable = False

    def __call__(self, params: Params, episodes: Episodes) -> MetaGradient:
        """Return the mean outer loss of the tasks and its gradient."""
        form = (episodes.device, *(tensor.shape for tensor in episodes.tensors()))
        if episodes.device.type == "cpu" or form not in self._checked:  # looking at a GPU's labels would stall it
            check(self.method, self.net, params, episodes)
            if self.flat and self.method.adapts == "all" and self.net.training and draws(self.net):
                raise InputError(
                    "flat runs every inner step twice, but this network drops at random in training, and would drop "
                    "otherwise the second time. Use flat=False, or net.eval()."
                )
            self._checked.add(form)
        if not self.method.split:
            episodes = episodes.without_split()
        mode = self.mode
        if mode == "auto":
            mode = "captured" if episodes.device.type == "cuda" else "workers"
        if mode in ("loop", "workers") and self._mixes_tasks():
            mode = "vectorised"
        if mode == "captured":
            return self._replayed(params, episodes)
        if mode == "vectorised":
            return self._all_at_once(params, episodes)
        if mode == "workers":
            return self._mean(params, len(episodes), *self._on_workers(params, episodes))
        return self._mean(params, len(episodes), *self._one_by_one(self.net, params, episodes))

    def _mixes_tasks(self) -> bool:
        """Whether the body's batch norm sees all tasks in one batch, so that they cannot be parted."""
        return self.method.adapts != "all" and self.net.training and bool(running_layers(self.net))

    def _sum(self, net: Network, params: Params, episodes: Episodes) -> tuple[Tensor, Params]:
        return summed_gradient(self.method, net, params, episodes, flat=self.flat, dtype=self.dtype)

    def _one_by_one(self, net: Network, params: Params, episodes: Episodes) -> tuple[Tensor, Params]:
        loss, total = self._sum(net, params, episodes[0])
        for task in range(1, len(episodes)):
            more, slopes = self._sum(net, params, episodes[task])
            loss = loss + more
            total = {name: value.add_(slopes[name]) for name, value in total.items()}
        return loss, total

    def _on_workers(self, params: Params, episodes: Episodes) -> tuple[Tensor, Params]:
        parts = over_cores(lambda net, share: self._one_by_one(net, params, share), self.net, episodes)
        loss = torch.stack([loss for loss, _ in parts]).sum()
        return loss, {name: torch.stack([total[name] for _, total in parts]).sum(0) for name in parts[0][1]}

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

    def _all_at_once(self, params: Params, episodes: Episodes) -> MetaGradient:
        return self._mean(params, len(episodes), *self._sum(self.net, params, episodes))

    def _replayed(self, params: Params, episodes: Episodes) -> MetaGradient:
        if episodes.device.type != "cuda" or self._uncapturable:
            return self._all_at_once(params, episodes)
        places = tuple(value.data_ptr() for value in params.values())
        form = (self.net.training, *((tensor.shape, tensor.dtype) for tensor in episodes.tensors()))
        if places != self._places or (form not in self._captures and len(self._captures) == CAPTURES):
            self._captures.clear()  # frees their memory before the next one takes its own
            self._places = places
        if form not in self._captures:
            try:
                self._captures[form] = _Capture(self._all_at_once, params, episodes)
            except RuntimeError as error:
                log.warning("this step cannot be captured as a CUDA graph and runs eagerly: %s", error)
                self._uncapturable = True
                return self._all_at_once(params, episodes)
        return self._captures[form].replay(episodes)


class _Capture:
    """A meta-step recorded once, with episodes of its own to read."""

    def __init__(self, compute: Callable[[Params, Episodes], MetaGradient], params: Params, episodes: Episodes) -> None:
        self.episodes = episodes.clone()
        self.recording = Recording(lambda: compute(params, self.episodes))

    def replay(self, episodes: Episodes) -> MetaGradient:
        for mine, given in zip(self.episodes.tensors(), episodes.tensors()):
            mine.copy_(given, non_blocking=True)
        return self.recording.replay()


def meta_gradient(
    method: Method, net: Network, params: Params, episodes: Episodes, *, mode: Mode = "auto", flat: bool = False
) -> MetaGradient:
    """Return the mean outer loss of the tasks and its gradient, once; see `Engine` for batch after batch."""
    if episodes.device.type == "cuda" and mode in ("auto", "captured"):
        mode = "vectorised"  # a capture pays from its second batch on
    return Engine(method, net, mode=mode, flat=flat)(params, episodes)
