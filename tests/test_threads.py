from __future__ import annotations

import gc
import os
import threading
import weakref
from functools import partial
from threading import Barrier

import pytest
import torch

from metabridge.threads import map_over_threads, stream_over_threads, thread_pool


@pytest.fixture
def two_threads():
    default = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(default)


def intra_op_threads_of_a_new_thread() -> int:
    counts = []
    thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return counts[0]


def test_workers_use_one_intra_op_thread_and_other_new_threads_the_default_number():
    default = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        pool = thread_pool(2)
        assert [future.result() for future in [pool.submit(torch.get_num_threads) for _ in range(4)]] == [1] * 4
        assert pool.submit(intra_op_threads_of_a_new_thread).result() == 3
        assert torch.get_num_threads() == 3
        assert thread_pool(2) is pool
    finally:
        torch.set_num_threads(default)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_creates_its_workers_again():
    thread_pool(2).submit(int).result()
    child = os.fork()
    if child == 0:
        os._exit(thread_pool(2).submit(lambda: 7).result(timeout=60))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_calls_inside_a_worker_do_not_wait_for_their_own_pool():
    def nested(items):
        for item in items:
            yield [*stream_over_threads(iter, [item]), *map_over_threads(abs, [item, -item])]

    results = thread_pool(1).submit(lambda: list(stream_over_threads(nested, [1, 2], 1))).result(timeout=60)
    assert results == [[1, 1, 1], [2, 2, 2]]


def test_a_stream_yields_the_results_of_all_threads_and_raises_their_errors():
    before = torch.get_num_threads()
    assert sorted(stream_over_threads(lambda items: (2 * item for item in items), [1, 2, 3])) == [2, 4, 6]

    def failing(items):
        yield from items
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        list(stream_over_threads(failing, [1, 2, 3]))
    assert torch.get_num_threads() == before


def test_a_map_keeps_the_order_and_the_gradient_mode(two_threads):
    assert list(map_over_threads(max, [1, 5, 2], [4, 3, 0])) == [4, 5, 2]
    with torch.no_grad():
        assert list(map_over_threads(lambda _: torch.is_grad_enabled(), [1, 2])) == [False, False]


class Token:
    """An object that a graph keeps alive."""


class KeepsToken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError("no derivative")


def differentiate(tokens, _):
    token, x = Token(), torch.ones((), requires_grad=True)
    tokens.append(weakref.ref(token))
    with torch.enable_grad():
        pending = KeepsToken.apply(x, token)
        y = pending + FailsBackward.apply(x)  # the newer node runs first
    torch.autograd.grad(y, x)


def test_the_graph_of_a_failed_backward_pass_is_released(two_threads):
    tokens, barrier = [], Barrier(2)
    with pytest.raises(NotImplementedError, match="no derivative"):
        list(map_over_threads(partial(differentiate, tokens), [0, 1]))
    list(map_over_threads(lambda _: barrier.wait(timeout=60), [0, 1]))  # both workers are idle again
    gc.collect()
    assert len(tokens) == 2
    assert [token() for token in tokens] == [None, None]
