from __future__ import annotations

import gc
import weakref
from functools import partial
from threading import Barrier

import pytest
import torch

from cases import clusters
from metabridge.learners.task_threads import over_cores


class Token:
    """Something that a graph holds."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no derivative")


def differentiate(tokens, task):
    token, x = Token(), torch.ones((), requires_grad=True)
    tokens.append(weakref.ref(token))
    with torch.enable_grad():
        left = Marked.apply(x, token)
        y = left + Failing.apply(x)  # the later of the two goes back first
    torch.autograd.grad(y, x)


@pytest.fixture
def two_cores():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def test_what_a_failed_backward_pass_leaves_undone_is_released(two_cores):
    tokens, episodes, both = [], clusters((4,)), Barrier(2)
    with pytest.raises(NotImplementedError, match="no derivative"):
        list(over_cores(partial(differentiate, tokens), [episodes[0], episodes[1]]))
    list(over_cores(lambda _: both.wait(timeout=60), [episodes[0], episodes[1]]))  # neither has anything left to do
    gc.collect()
    assert len(tokens) == 2
    assert [token() for token in tokens] == [None, None]
