from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from cases import clusters, relative_error
from metabridge import InputError
from metabridge.learners import method, parameters
from metabridge.learners.engine import Engine, Mode
from metabridge.models import BUILDERS, BatchNorm, Network, build, conv4, mlp, resnet12
from metabridge.models.network import apply_features, call_with_params, with_group_norm

NETS = {
    "mlp": lambda: mlp(12, 3, width=7, depth=3, activation="tanh", bias=False, seed=4),
    "conv4": lambda: conv4(3, 20, 4, filters=6, statistics="running", seed=5),
    "resnet12": lambda: resnet12(3, 16, 2, widths=(4, 4, 8, 8), drop_rate=0.2, dropout=0.3, unit_norm=True, seed=6),
}


@pytest.mark.parametrize("name", NETS)
def test_a_recipe_from_json_builds_the_same_network_again(name):
    net = NETS[name]()
    again = build(**json.loads(json.dumps(net.recipe)))
    assert str(again) == str(net)
    assert again.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in again.state_dict().items())
    assert BUILDERS[name].__doc__  # the decorator keeps the docstring


def test_a_network_without_a_builder_has_no_recipe():
    assert Network(nn.Linear(2, 3), nn.Linear(3, 1)).recipe is None


def separate_casts(net: Network, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the features in bfloat16, with a separate cast of every weight."""
    body = {name: value.to(torch.bfloat16) for name, value in params.items()}
    return functional_call(net.features, body, (x.to(torch.bfloat16),)).float()


def joint_cast(net: Network, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the features in bfloat16, as `apply_features` computes them with one cast of all weights."""
    return apply_features(net, {f"features.{name}": value for name, value in params.items()}, x, torch.bfloat16)


@pytest.mark.parametrize("name", ["mlp", "conv4"])
def test_derivatives_through_the_joint_cast_equal_those_of_separate_casts_to_second_order(name):
    net = NETS[name]()
    x = torch.randn(6, *((12,) if name == "mlp" else (3, 20, 20)), generator=torch.Generator().manual_seed(0))
    params = {key: value.detach().requires_grad_() for key, value in net.features.named_parameters()}

    def derivatives(compute_features):
        loss = compute_features(net, params, x).square().mean()
        gradients = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        squared_norm = sum(gradient.square().sum() for gradient in gradients)
        return [loss], gradients, torch.autograd.grad(squared_norm, list(params.values()), allow_unused=True)

    for joint, separate in zip(derivatives(joint_cast), derivatives(separate_casts)):
        for value, expected in zip(joint, separate):
            assert (value is None) == (expected is None)
            if value is not None:
                assert value.dtype == torch.float32
                assert (value - expected).norm() <= 0.05 * expected.norm() + 1e-6  # bfloat16 has a precision of 8 bits


def test_features_without_parameters_can_be_computed_in_low_precision():
    net = Network(nn.Flatten(), nn.Linear(4, 2))
    x = torch.rand(3, 4)
    assert torch.equal(apply_features(net, {}, x, torch.bfloat16), x.to(torch.bfloat16).float())


class Shared(nn.Module):
    """A layer under two names, whose weight is shared with another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.again, self.c = self.a, nn.Linear(4, 4)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.c(torch.tanh(self.again(torch.tanh(self.a(x))))))


class WithoutSharing(nn.Module):
    """The same function as `Shared`, without shared layers."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.a, self.c = copy.deepcopy(shared.a), nn.Module()
        self.c.bias = copy.deepcopy(shared.c.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(torch.tanh(self.a(x))))
        return torch.tanh(F.linear(x, self.a.weight, self.c.bias))


def with_and_without_sharing() -> tuple[Network, Network]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shared, head = Shared().double(), nn.Linear(4, 3).double()
    return Network(shared, head), Network(WithoutSharing(shared), copy.deepcopy(head))


@pytest.mark.parametrize("mode", ["loop", "workers", "vectorized"])
@pytest.mark.parametrize("name", ["maml", "fo-maml", "anil", "r2d2", "mtl", "reptile", "imaml"])
def test_shared_parameters_stay_shared_in_repeated_meta_gradients(name: str, mode: Mode) -> None:
    method_, nets, episodes = method(name), with_and_without_sharing(), clusters((4,))
    params = [parameters(method_, net, classes=6) for net in nets]
    assert params[0].keys() == params[1].keys()  # an optimizer gets a shared parameter once
    shared, unshared = (Engine(method_, net, mode=mode) for net in nets)
    expected = unshared(params[1], episodes).gradients
    for _ in range(2):
        gradients = shared(params[0], episodes).gradients
        assert gradients.keys() == expected.keys()
        for key, value in expected.items():
            assert value.norm() == gradients[key].norm() == 0 or relative_error(gradients[key], value) < 1e-9


def test_call_with_params_replaces_shared_parameters_everywhere_and_restores_the_module() -> None:
    shared, unshared = (net.features for net in with_and_without_sharing())
    originals = list(shared.parameters())
    params = {name: value.detach() + 1 for name, value in shared.named_parameters()}
    x = clusters((4,)).support_x[0]
    assert torch.equal(call_with_params(shared, params, x), call_with_params(unshared, params, x))
    assert shared.c.weight is shared.a.weight is shared.again.weight
    assert all(value is before for value, before in zip(shared.parameters(), originals, strict=True))


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_batch_norm_that_is_used_several_times_is_replaced_by_one_layer(statistics: str) -> None:
    norm, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    other.weight = norm.weight
    block = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    net = Network.around(nn.Sequential(block, nn.Sequential(norm, other)), torch.zeros(3, 4), 2, statistics=statistics)
    new_block, new_norms = net.features
    assert isinstance(new_block[1], BatchNorm)
    assert new_block[1] is new_block[3] is new_norms[0]
    assert new_norms[1] is not new_block[1]
    assert new_norms[1].weight is new_block[1].weight
    assert new_norms[1].bias is not new_block[1].bias
    grouped = with_group_norm(net.features, groups=2)
    assert isinstance(grouped[0][1], nn.GroupNorm)
    assert grouped[0][1] is grouped[0][3] is grouped[1][0]
    assert grouped[1][1].weight is grouped[0][1].weight


def test_around_does_not_change_the_original_module() -> None:
    norm = nn.BatchNorm1d(4)
    module = nn.Sequential(nn.Linear(4, 4), norm, norm)
    state_before = {name: value.clone() for name, value in module.state_dict().items()}
    net = Network.around(module, torch.zeros(3, 4), 2, statistics="running")
    with torch.no_grad():
        for value in (*net.parameters(), *net.buffers()):
            value.fill_(7)
    assert module[1] is module[2] is norm
    assert all(torch.equal(value, state_before[name]) for name, value in module.state_dict().items())


def test_around_with_dropout_does_not_change_the_global_random_state() -> None:
    before = torch.get_rng_state()
    Network.around(nn.Dropout(), torch.ones(3, 4), 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_around_keeps_frozen_parameters_and_evaluation_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    module[0].bias.requires_grad_(False)
    module[1].weight.requires_grad_(False)
    net = Network.around(module, torch.zeros(3, 4), 2)
    assert {name for name, value in net.named_parameters() if not value.requires_grad} == {
        "features.0.bias",
        "features.1.weight",
    }
    assert not net.features[1].training


def test_features_in_double_precision_get_a_head_in_double_precision() -> None:
    module, x = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), torch.randn(5, 4).double()
    net = Network.around(module, x, 2, statistics="running")
    assert {value.dtype for value in (*net.parameters(), *net.buffers())} == {torch.float64}
    assert net(x).dtype == net.eval()(x).dtype == torch.float64
    float32_net = Network.around(copy.deepcopy(module).float(), x.float(), 2)
    # the dtype does not change the initial weights
    assert torch.equal(net.head.weight, float32_net.head.weight.double())


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (nn.Linear(4, 3).double(), torch.zeros(3, 4), "cannot process the example, float32 of shape .* same dtype"),
        (nn.Linear(4, 3), torch.zeros(3, 5), r"cannot process the example, float32 of shape \(3, 5\)"),
        (nn.GRU(4, 3), torch.zeros(3, 2, 4), r"to a tuple, but must return a tensor of shape \(3, dimension\)"),
        (nn.Conv1d(4, 3, 1), torch.zeros(2, 4, 5), r"to float32 of shape \(2, 3, 5\), but must .* nn.Flatten"),
        (nn.BatchNorm1d(4), torch.zeros(1, 4), "one value per channel"),
    ],
)
def test_an_example_that_a_module_cannot_map_to_features_raises_an_input_error(module, example, message) -> None:
    with pytest.raises(InputError, match=message):
        Network.around(module, example, 2)


def test_the_error_for_a_head_that_shares_a_parameter_with_the_body_says_how_to_untie_it() -> None:
    net = Network(nn.Linear(3, 3), nn.Linear(3, 3))
    net.head.weight = net.features.weight
    with pytest.raises(InputError, match=r"head\.weight is also a parameter of the features.*Untie it") as caught:
        parameters(method("maml"), net)
    # run the code that the error suggests
    exec(str(caught.value).rpartition("Untie it: ")[2].removesuffix("."), {"net": net, "torch": torch})
    assert "head.weight" in parameters(method("maml"), net)


@pytest.mark.parametrize("mode", ["loop", "workers", "vectorized"])
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_a_batch_of_one_vector_cannot_be_normalized_in_any_mode(name: str, mode: Mode) -> None:
    net = Network.around(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), torch.zeros(3, 4), 3).double()
    tasks = clusters((4,))
    single_query = type(tasks)(tasks.support_x, tasks.support_y, tasks.query_x[:, :1], tasks.query_y[:, :1])
    with pytest.raises(
        InputError,
        match=r"batch norm got a batch of shape \(1, 3\), which has one value per channel.*at least two examples",
    ):
        Engine(method(name), net, mode=mode)(parameters(method(name), net), single_query)
