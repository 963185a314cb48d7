from __future__ import annotations

import threading

import pytest
import torch
from torch import nn
from torch.backends import cuda
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from backbones import library, small_transformer
from cases import CLASSES, CONVERGED_PROXIMAL, WAYS, flattened, unusual_episodes, unusual_net
from metabridge import Engine, InputError, meta_gradient, method, parameters
from metabridge.episodes import Episodes
from metabridge.learners.double_backward import second_derivatives
from metabridge.models import Network, hf


def enabled_backends():
    return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()


def test_the_last_thread_that_leaves_restores_the_attention_setting():
    before, entered, may_leave = enabled_backends(), threading.Event(), threading.Event()

    def enter_and_wait():
        with second_derivatives(weight_norm=False):
            entered.set()
            may_leave.wait(timeout=60)

    thread = threading.Thread(target=enter_and_wait)
    with second_derivatives(weight_norm=False):
        thread.start()
        assert entered.wait(timeout=60)
        assert enabled_backends() == (False, False, True)
    assert enabled_backends() == (False, False, True)
    may_leave.set()
    thread.join()
    assert enabled_backends() == before


def test_attention_is_twice_differentiable_inside_the_context():
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True)
    with second_derivatives(weight_norm=False):
        assert torch.autograd.gradgradcheck(lambda x: F.scaled_dot_product_attention(x, x, x), (x,))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm_has_the_correct_second_derivative_inside_the_context(dim):
    layer = parametrizations.weight_norm(nn.Linear(4, 3).double(), dim=dim)
    norm = layer.parametrizations.weight
    # the magnitude and the direction of the weight
    originals = [norm.original0.detach().requires_grad_(), norm.original1.detach().requires_grad_()]
    with second_derivatives(weight_norm=True):
        assert torch.autograd.gradgradcheck(norm[0], originals)


@pytest.mark.parametrize("name", ["attention", "multi-head attention"])
def test_imaml_through_attention_matches_finite_differences(name):
    learner = method("imaml", inner=CONVERGED_PROXIMAL)
    net, episodes = unusual_net(name), unusual_episodes(name, tasks=1)
    params = parameters(learner, net, classes=CLASSES)
    engine = Engine(learner, net)
    gradients = engine(params, episodes).gradients
    norm = flattened(gradients).norm()
    loss_after, loss_before = (
        float(engine({n: v.detach() + sign * 1e-5 * gradients[n] / norm for n, v in params.items()}, episodes).loss)
        for sign in (1, -1)
    )
    assert float(norm) == pytest.approx((loss_after - loss_before) / 2e-5, rel=1e-6)


def test_a_layer_without_second_derivative_raises_an_error_in_second_order_methods():
    net = Network(nn.EmbeddingBag(1000, 4).double(), nn.Linear(4, WAYS).double())
    episodes = unusual_episodes("embedding")
    meta_gradient(method("fo-maml"), net, parameters(method("fo-maml"), net), episodes)
    for mode in ("loop", "workers", "vectorized"):
        with pytest.raises(InputError, match=r"cannot be differentiated twice.*first-order"):
            meta_gradient(method("maml"), net, parameters(method("maml"), net), episodes, mode=mode)


def timm_transformer() -> Network:
    library("timm")
    from timm.models.vision_transformer import VisionTransformer

    features = VisionTransformer(img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=0)
    return Network.around(features, torch.zeros(2, 3, 16, 16), WAYS)


def transformers_model(model_type: str, attention: str) -> Network:
    library("transformers")
    config = small_transformer(model_type, image_size=16, patch_size=8)
    net = hf("any", size=16, outputs=WAYS, config=config, mean=[0.5], std=[0.5])
    net.features[1].model.set_attn_implementation(attention)
    return net


VISION_TRANSFORMERS = {
    "timm": timm_transformer,
    "dinov2": lambda: transformers_model("dinov2", "sdpa"),
    "vit, eager": lambda: transformers_model("vit", "eager"),
}


@pytest.mark.parametrize("mode", ["loop", "vectorized"])
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_second_order_maml_through_vision_transformers_matches_finite_differences(name, mode):
    torch.manual_seed(0)
    net, learner = VISION_TRANSFORMERS[name]().double(), method("maml", lr=0.02, steps=2)
    support_x, query_x = torch.rand(2, 2, 2 * WAYS, 3, 16, 16, dtype=torch.float64)
    labels = (torch.arange(2 * WAYS) % WAYS).expand(2, -1).clone()
    episodes, params = Episodes(support_x, labels, query_x, labels), parameters(learner, net)
    engine = Engine(learner, net, mode=mode)
    gradients = engine(params, episodes).gradients
    norm = flattened(gradients).norm()
    loss_after, loss_before = (
        float(engine({n: v.detach() + sign * 1e-6 * gradients[n] / norm for n, v in params.items()}, episodes).loss)
        for sign in (1, -1)
    )
    assert float(norm) == pytest.approx((loss_after - loss_before) / 2e-6, rel=1e-4)
    first_order = meta_gradient(method("fo-maml", lr=0.02, steps=2), net, params, episodes).gradients
    assert (flattened(first_order) - flattened(gradients)).norm() > 1e-2 * norm  # the second order matters
