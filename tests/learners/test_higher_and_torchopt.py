"""Meta-gradients of MAML and ANIL compared with the libraries higher and torchopt."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import NETS, clusters, relative_error
from metabridge.learners import Engine, method, parameters

LR, STEPS = 0.05, 4


def convert_to_pytorch(net, shape) -> nn.Module:
    """Return the same network made of PyTorch's layers, with the same weights in the same order."""
    if len(shape) == 1:
        layers = [nn.Flatten(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    else:
        layers = []
        for inputs in (1, 4, 4, 4):
            norm = nn.BatchNorm2d(4, track_running_stats=False)
            layers += [nn.Conv2d(inputs, 4, 3, padding=1, bias=False), norm, nn.ReLU(), nn.MaxPool2d(2)]
        layers.append(nn.Flatten())
    reference = nn.Sequential(nn.Sequential(*layers), nn.Linear(net.head.in_features, net.head.out_features)).double()
    with torch.no_grad():
        for source, copy in zip(net.parameters(), reference.parameters(), strict=True):
            copy.copy_(source)
    return reference


def gradients_with_higher(reference, episodes, head_only):
    """Return the meta-gradient that higher computes for each parameter of `reference`."""
    higher = pytest.importorskip("higher")
    for task in range(len(episodes)):
        module = reference[1] if head_only else reference
        support = reference[0](episodes.support_x[task]) if head_only else episodes.support_x[task]
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        with higher.innerloop_ctx(module, optimizer, copy_initial_weights=False) as (adapted, inner_optimizer):
            for _ in range(STEPS):
                inner_optimizer.step(F.cross_entropy(adapted(support), episodes.support_y[task]))
            query = reference[0](episodes.query_x[task]) if head_only else episodes.query_x[task]
            (F.cross_entropy(adapted(query), episodes.query_y[task]) / len(episodes)).backward()
    return [value.grad for value in reference.parameters()]


def gradients_with_torchopt(reference, episodes, head_only):
    """Return the meta-gradient that torchopt computes for each parameter of `reference`."""
    torchopt = pytest.importorskip("torchopt")
    for task in range(len(episodes)):
        module = reference[1] if head_only else reference
        support = reference[0](episodes.support_x[task]) if head_only else episodes.support_x[task]
        optimizer = torchopt.MetaSGD(module, lr=LR)
        module_state = torchopt.extract_state_dict(module, by="reference")
        optimizer_state = torchopt.extract_state_dict(optimizer, by="reference")
        for _ in range(STEPS):
            optimizer.step(F.cross_entropy(module(support), episodes.support_y[task]))
        query = reference[0](episodes.query_x[task]) if head_only else episodes.query_x[task]
        loss = F.cross_entropy(module(query), episodes.query_y[task]) / len(episodes)
        torchopt.recover_state_dict(module, module_state)
        torchopt.recover_state_dict(optimizer, optimizer_state)
        loss.backward()
    return [value.grad for value in reference.parameters()]


@pytest.mark.parametrize("reference_gradients", [gradients_with_higher, gradients_with_torchopt])
@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_meta_gradients_agree_with_other_libraries(name, net_name, reference_gradients):
    case = NETS[net_name]
    net, episodes = case.make(), clusters(case.shape)
    learner = method(name, steps=STEPS, lr=LR)
    params = parameters(learner, net)
    reference = convert_to_pytorch(net, case.shape)
    expected = torch.cat([value.flatten() for value in reference_gradients(reference, episodes, name == "anil")])
    for mode, flat in [("loop", False), ("loop", True), ("vectorized", False), ("workers", True)]:
        gradients = Engine(learner, net, mode=mode, flat=flat)(params, episodes).gradients
        actual = torch.cat([gradients[n].flatten() for n, _ in net.named_parameters()])
        assert relative_error(actual, expected) < 1e-9, mode
