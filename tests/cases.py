"""Small tasks and networks that the tests share. A new method is tested against everything by adding it here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from metabridge.episodes import Episodes
from metabridge.learners import GradientDescent, Method, Proximal, Ridge, SupportVectors, method
from metabridge.models import Network, conv4, mlp

CLASSES, WAYS = 6, 3

# Stands for a proximal problem solved to rounding, since what is implicit supposes the minimum.
SOLVED = Proximal(strength=2.0, steps=150, lr=0.2, cg_steps=40)

METHODS: dict[str, Method] = {
    "maml": method("maml", lr=0.1),
    "fo-maml": method("fo-maml", lr=0.1),
    "anil": method("anil"),
    "fo-anil": method("fo-anil"),
    "anil-frozen": method("anil-frozen"),
    "reptile": method("reptile", lr=0.1),
    "imaml": method("imaml", inner=SOLVED),
    "minibatch-prox": method("minibatch-prox", inner=SOLVED),
    "r2d2": method("r2d2"),
    "metaoptnet": method("metaoptnet"),
    "mtl": method("mtl"),
    "nal": method("nal"),
    "rfs": method("rfs"),
    # and other points of the taxonomy that make sense
    "maml with a rate for every element": method("maml", lr=0.1, rates="per-element"),
    "maml without split": method("maml", lr=0.1, split=False),
    "maml with a rate for every layer": method("maml", lr={"features": 0.02, "head": 0.2}),
    "maml with a frozen head": method("maml", head="frozen", lr=0.1),
    "fo-maml with a rate for every tensor": method("fo-maml", lr=0.1, rates="per-tensor"),
    "anil with a rate for every tensor": method("anil", rates="per-tensor"),
    "anil without split": method("anil", split=False),
    "proximal maml, exact": Method("all", Proximal(steps=5, lr=0.1)),
    "proximal head, exact": Method("head", Proximal(steps=5, lr=0.1)),
    "proximal head, implicit": Method("head", SOLVED, outer="implicit"),
    "proximal head, first order": Method("head", Proximal(steps=5, lr=0.1), outer="first-order"),
    "r2d2, first order": Method("head", Ridge(), outer="first-order", head="solved"),
    "metaoptnet, first order": Method("head", SupportVectors(), outer="first-order", head="solved"),
    "maml of no steps": Method("all", GradientDescent(steps=0)),
}


def smooth_mlp() -> Network:
    return mlp(4, WAYS, width=6, activation="tanh").double()


def small_conv4() -> Network:
    return conv4(1, 16, WAYS, filters=4).double()


@dataclass(frozen=True)
class NetCase:
    """A network, its input shape, and what its kinks ask of a test.

    Where a rectifier changes sign an inner gradient jumps, and with it the adapted loss: finite
    differences need a step too short to meet that, and a proximal problem must be strong enough for
    its minimum not to lie on a kink.
    """

    make: Callable[[], Network]
    shape: tuple[int, ...]
    step: float
    solved: Proximal

    def method(self, name: str) -> Method:
        chosen = METHODS[name]
        return replace(chosen, inner=self.solved) if chosen.inner is SOLVED else chosen


NETS = {
    "smooth mlp": NetCase(smooth_mlp, (4,), 1e-5, SOLVED),
    "conv4 with batch norm": NetCase(
        small_conv4, (1, 16, 16), 2e-7, Proximal(strength=1e4, steps=40, lr=8e-5, cg_steps=10)
    ),
}


def clusters(shape: tuple[int, ...], tasks: int = 3, shots: int = 2, queries: int = 3, seed: int = 0) -> Episodes:
    """Classification tasks in float64: a random centre for each class, and noise around it."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(tasks, WAYS, *shape, generator=generator, dtype=torch.float64)

    def draw(points: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(WAYS).repeat_interleave(points).expand(tasks, -1).contiguous()
        noise = torch.randn(tasks, WAYS * points, *shape, generator=generator, dtype=torch.float64)
        return centres.repeat_interleave(points, dim=1) + 0.8 * noise, labels

    classes = torch.stack([torch.randperm(CLASSES, generator=generator)[:WAYS] for _ in range(tasks)])
    return Episodes(*draw(shots), *draw(queries), classes=classes)


def relative(value: Tensor, reference: Tensor) -> float:
    """‖value − reference‖ / ‖reference‖."""
    return float((value - reference).norm() / reference.norm())


def flattened(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([params[name].flatten() for name in sorted(params)])
