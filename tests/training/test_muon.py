from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from metabridge.errors import InputError
from metabridge.training.muon import FILTER_RATE, Muon, orthogonalize

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reference_step(param: Tensor, grad: Tensor, momentum: Tensor, lr: float) -> None:
    """Update a filter bank in place by one step from the definition: the polynomial is applied to singular values."""
    momentum.mul_(0.9).add_(grad)
    step = (grad + 0.9 * momentum).flatten(1).double()
    left, singular_values, right = torch.linalg.svd(step / (step.norm() + 1e-7), full_matrices=False)
    for _ in range(3):
        singular_values = 3.4445 * singular_values - 4.7750 * singular_values**3 + 2.0315 * singular_values**5
    param.mul_(len(param) ** 0.5 / param.norm())
    param.sub_(lr * FILTER_RATE * (left * singular_values @ right).view(param.shape).to(param))


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, bias=False),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def set_gradients(net: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for param in net.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param)


def test_steps_of_filter_banks_apply_the_polynomial_to_singular_values() -> None:
    net = small_net()
    banks = [net[index].weight for index in range(3)]
    expected_banks = [bank.detach().clone() for bank in banks]
    momenta = [torch.zeros_like(bank) for bank in banks]
    optimizer = Muon(net.parameters(), lr=0.3, weight_decay=0.1)
    for step in range(4):
        set_gradients(net, step)
        for bank, expected_bank, momentum in zip(banks, expected_banks, momenta):
            reference_step(expected_bank, bank.grad, momentum, 0.3)
        optimizer.step()
    for bank, expected_bank in zip(banks, expected_banks):
        assert torch.allclose(bank, expected_bank, atol=1e-5)


def test_other_parameters_take_the_steps_of_sgd() -> None:
    net, sgd_net = small_net(), small_net()
    optimizer = Muon(net.parameters(), lr=0.3, weight_decay=0.1)
    sgd = torch.optim.SGD(sgd_net.parameters(), lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1)
    for step in range(4):
        set_gradients(net, step)
        optimizer.step()
        set_gradients(sgd_net, step)
        sgd.step()
    for index in (3, 5):  # the depthwise convolution and the linear layer
        assert torch.allclose(net[index].weight, sgd_net[index].weight, atol=1e-6)
        assert torch.allclose(net[index].bias, sgd_net[index].bias, atol=1e-6)


def test_filter_banks_of_the_same_shape_do_not_affect_each_other() -> None:
    banks = list(torch.randn(3, 8, 4, 3, 3))
    batched, separate = orthogonalize(banks), [orthogonalize([bank])[0] for bank in banks]
    assert torch.allclose(torch.stack(batched), torch.stack(separate), atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 8, 3, 3), (64, 2, 3, 3)])
def test_steps_of_wide_and_tall_matrices_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    singular_values = torch.linalg.svdvals(
        orthogonalize([torch.randn(shape, generator=torch.Generator().manual_seed(0))])[0].flatten(1)
    )
    assert singular_values.min() > 0.5
    assert singular_values.max() < 1.3


def test_a_restored_optimizer_takes_the_same_steps() -> None:
    net = small_net()
    optimizer = Muon(net.parameters(), lr=0.3)
    set_gradients(net, 0)
    optimizer.step()
    restored_net = small_net()
    restored_net.load_state_dict(net.state_dict())
    restored_optimizer = Muon(restored_net.parameters(), lr=0.3)
    # a copy, since otherwise both optimizers would share their tensors
    restored_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model, model_optimizer in ((net, optimizer), (restored_net, restored_optimizer)):
        set_gradients(model, 1)
        model_optimizer.step()
    assert all(torch.equal(*params) for params in zip(net.parameters(), restored_net.parameters()))


def test_a_learning_rate_that_is_not_positive_raises_an_error() -> None:
    with pytest.raises(InputError, match="lr is 0"):
        Muon(small_net().parameters(), lr=0)


@CUDA
def test_steps_replayed_from_a_cuda_graph_equal_steps_on_a_cpu() -> None:
    nets = small_net().cuda(), small_net()
    optimizers = [Muon(net.parameters(), lr=0.3) for net in nets]
    for step in range(5):
        for net, optimizer in zip(nets, optimizers):
            set_gradients(net, step)
            for group in optimizer.param_groups:
                group["lr"] = 0.3 / (1 + step)
            optimizer.step()
    for gpu_param, cpu_param in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.allclose(gpu_param.cpu(), cpu_param, atol=2e-2)
