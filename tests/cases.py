"""Methods, small tasks and networks that tests share. All tests of methods run for every method in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from metabridge.environments import LabeledImages
from metabridge.episodes import Episodes
from metabridge.learners import OUTER_RULES, Method, method
from metabridge.models import Network, conv4, mlp
from metabridge.solvers import GradientDescent, Proximal, RidgeSolver, Solver, SVMSolver

CLASSES, WAYS = 6, 3  # training classes, and classes per task

# This proximal problem is solved up to rounding errors, because implicit gradients are exact only at its minimum.
CONVERGED_PROXIMAL = Proximal(strength=2.0, steps=150, lr=0.2, cg_steps=40)

METHODS: dict[str, Method] = {
    "maml": method("maml", lr=0.1),
    "fo-maml": method("fo-maml", lr=0.1),
    "anil": method("anil"),
    "fo-anil": method("fo-anil"),
    "anil-frozen": method("anil-frozen"),
    "reptile": method("reptile", lr=0.1),
    "imaml": method("imaml", inner=CONVERGED_PROXIMAL),
    "minibatch-prox": method("minibatch-prox", inner=CONVERGED_PROXIMAL),
    "r2d2": method("r2d2"),
    "metaoptnet": method("metaoptnet"),
    "mtl": method("mtl"),
    "nal": method("nal"),
    "rfs": method("rfs"),
    # other combinations of options
    "maml with a learning rate for every element": method("maml", lr=0.1, rates="per-element"),
    "maml without split": method("maml", lr=0.1, split=False),
    "maml with a learning rate for every layer": method("maml", lr={"features": 0.02, "head": 0.2}),
    "maml with a frozen head": method("maml", training_head="frozen", lr=0.1),
    "fo-maml with a learning rate for every tensor": method("fo-maml", lr=0.1, rates="per-tensor"),
    "anil with a learning rate for every tensor": method("anil", rates="per-tensor"),
    "anil without split": method("anil", split=False),
    "proximal maml, exact": Method("all", Proximal(steps=5, lr=0.1)),
    "proximal head, exact": Method("head", Proximal(steps=5, lr=0.1)),
    "proximal head, implicit": Method("head", CONVERGED_PROXIMAL, outer="implicit"),
    "proximal head, first order": Method("head", Proximal(steps=5, lr=0.1), outer="first-order"),
    "r2d2, first order": Method("head", RidgeSolver(), outer="first-order", training_head="solved"),
    "metaoptnet, first order": Method("head", SVMSolver(), outer="first-order", training_head="solved"),
    "maml with no steps": Method("all", GradientDescent(steps=0)),
}
TESTED_ELSEWHERE = {"burer-monteiro", "frozen"}  # presets that need a special network or train nothing


def solver_method(solver_type: type[Solver], outer: str) -> Method:
    """Return a method with this solver and this outer gradient."""
    if solver_type.solves_exactly:
        return Method("head", solver_type(), outer=outer, training_head="solved")
    return Method("all" if OUTER_RULES[outer].all_layers else "head", solver_type(), outer=outer)


# Every solver is tested with every outer gradient that it supports: add the combinations that no method above has.
_combinations = {(type(learner.inner), learner.outer) for learner in METHODS.values()}
METHODS |= {
    f"{solver_type.__name__}, {outer}": solver_method(solver_type, outer)
    for solver_type in Solver.registry.values()
    for outer in solver_type.outer_rules
    if (solver_type, outer) not in _combinations
}


def smooth_mlp() -> Network:
    return mlp(4, WAYS, width=6, activation="tanh").double()


def small_conv4() -> Network:
    return conv4(1, 16, WAYS, filters=4).double()


@dataclass(frozen=True)
class NetCase:
    """A network, the shape of its inputs, and settings for tests of its derivatives.

    Where the input of a ReLU changes sign, the gradient of the inner loss jumps, and the loss after adaptation has a
    kink. `step` is a step size of finite differences that crosses no kink, and `proximal` replaces `CONVERGED_PROXIMAL`
    by a solver whose strength is so large that the minimum of the proximal problem does not lie on a kink.
    """

    make: Callable[[], Network]
    shape: tuple[int, ...]
    step: float
    proximal: Proximal

    def method(self, name: str) -> Method:
        """Return a method of `METHODS`, with `proximal` in place of `CONVERGED_PROXIMAL`."""
        learner = METHODS[name]
        return replace(learner, inner=self.proximal) if learner.inner is CONVERGED_PROXIMAL else learner


NETS = {
    "smooth mlp": NetCase(smooth_mlp, (4,), 1e-5, CONVERGED_PROXIMAL),
    "conv4 with batch norm": NetCase(
        small_conv4, (1, 16, 16), 2e-7, Proximal(strength=1e4, steps=40, lr=8e-5, cg_steps=10)
    ),
}


class SumOfParameters(nn.Module):
    """A layer for which autograd returns one tensor as the gradient of two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.shift).tanh()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).tanh()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cells(x)[0][:, -1]


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(2, 12), dropout

    def forward(self, x: Tensor) -> Tensor:
        # q, k and v have the shape (examples, heads, positions, 2)
        q, k, v = self.project(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).mean(2).flatten(1)


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0].flatten(1)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).mean(1).tanh()


class ChangingBuffers(nn.Module):
    """A layer with a running mean that is changed in place, and a counter of calls that is replaced."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        centered = (x - self.mean.clone()).tanh() / (1 + 0.1 * self.calls)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls = self.calls + 1
        return centered


class Adapter(nn.Module):
    """A layer with a hook that uses a parameter from its closure."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 5), nn.Parameter(torch.rand(5) + 0.5)
        self.layer.register_forward_hook(lambda layer, inputs, output: output * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.mT) / 2


def symmetric_layer() -> nn.Module:
    return nn.Sequential(parametrize.register_parametrization(nn.Linear(4, 4), "weight", Symmetric()), nn.Tanh())


def normed_layer() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh())


def group_normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Softplus(), nn.Flatten())


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 1, dim_feedforward=3, dropout=0.0, activation="gelu", batch_first=True)
    return nn.Sequential(layer, nn.Flatten())


# Networks with unusual properties that engines must handle: a function that makes their features, and the shape of an
# input.
UNUSUAL_FEATURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sum of parameters": (SumOfParameters, (4,)),
    "tied weights": (Tied, (4,)),
    "a layer under two names": (TwoNames, (4,)),
    "group norm": (group_normed, (1, 4, 4)),
    "LSTM": (Recurrent, (3, 2)),
    "attention": (Attention, (3, 2)),
    "multi-head attention": (MultiheadAttention, (3, 2)),
    "transformer": (transformer, (2, 4)),
    "embedding": (Tokens, (3,)),
    "parametrized layer": (symmetric_layer, (4,)),
    "weight norm": (normed_layer, (4,)),
    "buffers that change": (ChangingBuffers, (4,)),
    "parameter in a closure": (Adapter, (4,)),
}


def unusual_net(name: str, seed: int = 0) -> Network:
    """Return a network with features from `UNUSUAL_FEATURES`, in float64 and in training mode."""
    make, shape = UNUSUAL_FEATURES[name]
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        features = make().double()
        example = torch.zeros(2, *shape, dtype=torch.int64 if name == "embedding" else torch.float64)
        with torch.no_grad():
            width = features.eval()(example).shape[1]
        return Network(features, nn.Linear(width, WAYS).double()).train()


def unusual_episodes(name: str, tasks: int = 3) -> Episodes:
    """Return tasks for the network `unusual_net(name)`."""
    episodes = clusters(UNUSUAL_FEATURES[name][1], tasks=tasks)
    if name == "embedding":
        return episodes.map_inputs(lambda x: (100 * x).long().abs().clamp(max=999))
    return episodes


def clusters(shape: tuple[int, ...], tasks: int = 3, shots: int = 2, queries: int = 3, seed: int = 0) -> Episodes:
    """Return classification tasks in float64: a random center for each class, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(tasks, WAYS, *shape, generator=generator, dtype=torch.float64)

    def draw(examples: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(WAYS).repeat_interleave(examples).expand(tasks, -1).contiguous()
        noise = torch.randn(tasks, WAYS * examples, *shape, generator=generator, dtype=torch.float64)
        return centers.repeat_interleave(examples, dim=1) + 0.8 * noise, labels

    classes = torch.stack([torch.randperm(CLASSES, generator=generator)[:WAYS] for _ in range(tasks)])
    return Episodes(*draw(shots), *draw(queries), classes=classes)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Return ‖value − reference‖ / ‖reference‖."""
    return float((value - reference).norm() / reference.norm())


def flattened(params: dict[str, Tensor]) -> Tensor:
    return torch.cat([params[name].flatten() for name in sorted(params)])


def numbered_images(classes: int, per_class: int) -> LabeledImages:
    """Return images of two pixels, which contain the class of the image and its index within the class.

    `classes` must be 100: 64 for training, 16 for validation and 20 for test, as in mini-ImageNet.
    """
    labels = torch.arange(classes).repeat_interleave(per_class)
    indices = torch.arange(per_class).repeat(classes)
    return LabeledImages(
        images=torch.stack([labels, indices], dim=-1).to(torch.uint8)[:, None, None, :],
        labels=labels,
        class_names=tuple(f"class{index}" for index in range(classes)),
        superclasses=torch.zeros(classes, dtype=torch.int64),
        superclass_names=("all",),
        splits=dict(zip(("train", "validation", "test"), torch.arange(classes).split([64, 16, 20]))),
    )
