"""Tests of every registered test-time head; `test_heads.py` compares heads with scikit-learn."""

from __future__ import annotations

import pytest
import torch

from cases import CLASSES, clusters, smooth_mlp
from metabridge.errors import InputError
from metabridge.heads import FITTED_HEADS, Head, create_head
from metabridge.learners import method, parameters
from metabridge.learners.adapt import predict

every_head = pytest.mark.parametrize("name", Head.registry)


def separated_classes() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(4).repeat(2, 5)
    centers = 3 * torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    x = centers.gather(1, y[..., None].expand(-1, -1, 6))
    return x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64), y


@every_head
def test_a_head_created_by_name_classifies_separated_classes(name):
    x, y = separated_classes()
    head = create_head(name)
    assert head.normalize
    fitted = head.fit(x, y, 4)
    assert torch.equal(fitted.scores(x).argmax(-1), y)
    assert FITTED_HEADS[type(fitted).__name__] is type(fitted)
    assert fitted.weight.shape[1:] == (fitted.rows(4), 6)


@every_head
def test_a_larger_penalty_makes_the_weights_smaller(name):
    x, y = separated_classes()
    if Head.registry[name].default_penalty is None:
        with pytest.raises(InputError, match=rf"penalty is 2\.0, but the head '{name}' has no penalty"):
            create_head(name, 2.0)
        return
    weak, strong = (create_head(name, penalty).fit(x, y, 4).weight.norm() for penalty in (0.5, 5.0))
    assert strong < weak
    with pytest.raises(InputError, match=r"penalty is 0\.0, but must be a positive number"):
        create_head(name, 0.0)


@every_head
def test_predictions_of_a_method_with_this_test_time_head_are_finite(name):
    learner, net, episodes = method("mtl", test_solver=name), smooth_mlp(), clusters((4,))
    assert predict(learner, net, parameters(learner, net, classes=CLASSES), episodes).isfinite().all()


@every_head
def test_a_head_says_if_it_is_calibrated_and_fits_real_values_only_if_it_supports_regression(name):
    cls = Head.registry[name]
    assert isinstance(cls.calibrated, bool)
    x = torch.randn(2, 6, 3)
    targets = torch.randn(2, 6, 1)
    if cls.supports_regression:
        assert create_head(name).fit(x, targets, 1).weight.shape == (2, 1, 3)
    else:
        with pytest.raises(InputError, match=r"labels is float32 of shape \(2, 6, 1\).*For real-valued targets, use"):
            create_head(name).fit(x, targets, 1)


def test_an_unknown_head_raises_an_error_with_all_names():
    with pytest.raises(InputError, match=f"head is 'forest', but must be one of {', '.join(sorted(Head.registry))}"):
        create_head("forest")
