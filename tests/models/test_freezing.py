from __future__ import annotations

import pytest
import torch
from torch import nn

from metabridge import InputError, fit, method
from metabridge.environments import LabeledImages
from metabridge.learners import Engine, parameters
from metabridge.learners.adapt import adapt
from metabridge.models import BatchNorm, Network, conv4, estimate_statistics, mlp
from metabridge.models.freezing import fix_frozen_modules, freeze_parameters, frozen_modules
from metabridge.models.network import apply_features, frozen_names
from metabridge.training import Trainer, TrainingConfig

FROZEN = ("features.0", "features.1")


def images() -> LabeledImages:
    """Eight classes of 16-pixel images of noise, six to train on and two to validate on."""
    labels = torch.arange(8).repeat_interleave(8)
    pixels = torch.randint(0, 256, (64, 1, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    splits = {"train": torch.arange(6), "validation": torch.arange(6, 8)}
    return LabeledImages(pixels, labels, tuple("abcdefgh"), torch.zeros(8, dtype=torch.int64), ("all",), splits)


def tasks(name: str = "mtl"):
    return images().batches("train", size=8) if name == "rfs" else images().tasks("train", ways=3, shots=2, queries=2)


def measured_conv4(statistics: str = "running") -> Network:
    """Return a conv4 whose running statistics were measured on inputs that differ from the images."""
    net = conv4(1, 16, 3, filters=4, statistics=statistics)
    estimate_statistics(net.features, [torch.randn(16, 1, 16, 16, generator=torch.Generator().manual_seed(0)) - 3])
    return net


def copies(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def test_a_prefix_consists_of_whole_components():
    net = mlp(4, 5, width=3, depth=6)
    freeze_parameters(net, ["features.1"])
    assert {"features.11.weight"} < dict(net.named_parameters()).keys()
    assert frozen_names(net) == {"features.1.weight", "features.1.bias"}
    freeze_parameters(net, ["features.11.bias", "head"])
    assert frozen_names(net) == {
        "features.1.weight",
        "features.1.bias",
        "features.11.bias",
        "head.weight",
        "head.bias",
    }


@pytest.mark.parametrize(
    ("prefix", "names"),
    [
        ("layer1", "features.0, features.1, features.2, features.3"),
        ("features.9", "features.0, features.1, features.2, features.3"),
        ("features.0.7", "features.0.0, features.0.1"),
        ("features.", "features.0, features.1, features.2, features.3"),
        ("head.scale", "head.weight, head.bias"),
        ("", "features.0, features.1, features.2, features.3"),
    ],
)
def test_a_prefix_that_matches_nothing_raises_an_error_with_the_nearest_names(prefix, names):
    with pytest.raises(InputError) as caught:
        freeze_parameters(conv4(1, 16), [prefix])
    assert str(caught.value) == f"freeze is {prefix!r}, but the network has no such part. Use one of {names}."


@pytest.mark.parametrize("name", ["mtl", "rfs", "maml", "anil", "r2d2"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parts_keep_their_weights_and_statistics_bit_by_bit(name, optimizer):
    net = measured_conv4()
    before = copies(net)
    options = {"optimizer": optimizer, "weight_decay": 0.1, "lr": 0.1, "ema_decay": 0.5, "validate_tasks": 2}
    environment, validation = tasks(name), images().tasks("validation", ways=2, shots=1, queries=2)
    batch_size = 1 if name == "rfs" else 2
    run = fit(
        net,
        method(name),
        environment,
        validate=validation,
        batch_size=batch_size,
        iterations=2,
        freeze=FROZEN,
        progress=False,
        **options,
    )
    after = run.net.state_dict()
    frozen = [key for key in before if key.startswith(FROZEN)]
    assert len(frozen) == 10  # of each of two blocks: three parameters and two statistics
    assert all(torch.equal(before[key], after[key]) for key in frozen)
    assert all(torch.equal(before[key], run.params[key]) for key in frozen if key in run.params)
    trained = [key for key in before if key.startswith(("features.2", "features.3"))]
    assert not any(torch.equal(before[key], after[key]) for key in trained)


def test_a_frozen_part_is_applied_with_its_statistics_in_training():
    net = measured_conv4().train()
    freeze_parameters(net, FROZEN)
    fix_frozen_modules(net, ())
    x = torch.rand(6, 1, 16, 16)
    frozen_part, end = net.features[:2], net.features[2:]
    expected = end.train()(frozen_part.eval()(x))
    assert net.training
    assert torch.allclose(apply_features(net, dict(net.named_parameters()), x), expected, atol=1e-6)


def test_the_trainer_keeps_frozen_parts_in_evaluation_mode_and_the_others_in_training_mode():
    config = TrainingConfig(freeze=FROZEN, iterations=3, validate_every=1, validate_tasks=2, batch_size=2)
    validation = images().tasks("validation", ways=2, shots=1, queries=2)
    trainer = Trainer(measured_conv4(), method("mtl"), tasks(), config, validate=validation)
    for _ in range(2):
        assert [block[1].training for block in trainer.net.features[:4]] == [False, False, True, True]
        assert trainer.net.training
        trainer.step()


def test_frozen_statistics_that_were_never_measured_are_measured_before_training():
    net = conv4(1, 16, 3, filters=4, statistics="running")
    batches = list(torch.rand(2, 6, 1, 16, 16))
    freeze_parameters(net, FROZEN)
    fix_frozen_modules(net.train(), iter(batches))
    expected = conv4(1, 16, 3, filters=4, statistics="running")
    estimate_statistics(expected.features, batches)
    assert torch.equal(net.features[1][1].mean, expected.features[1][1].mean)
    mean = net.features[1][1].mean.clone()
    fix_frozen_modules(net, iter(2 * batch for batch in batches))  # now they are measured, so they stay
    assert torch.equal(net.features[1][1].mean, mean)


def test_a_fixed_batch_norm_keeps_its_statistics_and_uses_them_when_others_are_measured():
    first, second = BatchNorm(1, "running"), BatchNorm(1, "running")
    net = nn.Sequential(first, second).eval()
    first.mean.fill_(5.0)
    estimate_statistics(net, [torch.tensor([[5.0], [7.0]])], fixed=[first])
    assert first.mean.item() == 5
    assert second.mean.item() == pytest.approx(1, abs=1e-4)  # the mean of (5 - 5)/1 and (7 - 5)/1
    assert not any(module.training for module in net.modules())


def test_modules_inside_a_frozen_module_are_frozen_but_not_modules_without_parameters_beside_it():
    dropout = nn.Dropout()
    features = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), dropout, nn.Linear(4, 3))
    net = Network(features, nn.Linear(3, 2))
    freeze_parameters(net, ["features.0"])
    assert set(frozen_modules(net)) == {features[0], features[0][0], features[0][1]}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_no_gradients_of_frozen_parameters_are_computed(dtype):
    net = measured_conv4().train()
    freeze_parameters(net, FROZEN)
    fix_frozen_modules(net, ())
    params = parameters(method("mtl"), net, classes=6)
    features = apply_features(net, params, torch.rand(6, 1, 16, 16), dtype)
    nodes, queue = set(), [features.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            queue += [parent for parent, _ in node.next_functions]
    assert sum("Convolution" in node.name() for node in nodes) == 2  # only of the two blocks that are trained
    gradients = Engine(method("mtl"), net, dtype=dtype)(params, tasks().sample(2, torch.Generator())).gradients
    assert gradients.keys() == {name for name in params if name not in frozen_names(net) and name[:5] != "head."}


def test_frozen_parts_do_not_adapt():
    net = conv4(1, 16, 3, filters=4)
    freeze_parameters(net, FROZEN)
    maml = method("maml", lr=0.5)
    params, episode = parameters(maml, net), tasks().sample(1, torch.Generator().manual_seed(0))[0]
    adapted = adapt(maml, net, params, episode.support_x[0], episode.support_y[0])
    assert all(torch.equal(adapted.params[name], params[name]) for name in frozen_names(net))
    assert not torch.equal(adapted.params["features.2.0.weight"], params["features.2.0.weight"])


def test_freezing_everything_raises_an_error():
    with pytest.raises(InputError, match="there is nothing to train"):
        fit(conv4(1, 16, 3), method("maml"), tasks(), freeze=("features", "head"), iterations=1, progress=False)


@pytest.mark.parametrize("value", ["features.0", (1,), 3])
def test_freeze_must_be_a_tuple_of_names(value):
    with pytest.raises(InputError, match=r"must be a tuple of names, such as \('features\.0',\), or None"):
        fit(conv4(1, 16, 3), method("maml"), tasks(), freeze=value, iterations=1, progress=False)
