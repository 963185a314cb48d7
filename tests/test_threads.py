from __future__ import annotations

import os
import threading

import pytest
import torch

from metabridge.threads import over_threads, pool, shell


def compute_threads() -> int:
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_workers_have_one_compute_thread_and_threads_begun_meanwhile_have_the_usual_number():
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        workers = pool(2)
        assert [future.result() for future in [workers.submit(torch.get_num_threads) for _ in range(4)]] == [1] * 4
        assert workers.submit(compute_threads).result() == 3
        assert torch.get_num_threads() == 3
        assert pool(2) is workers
    finally:
        torch.set_num_threads(usual)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_process_makes_workers_of_its_own():
    pool(2).submit(int).result()
    child = os.fork()
    if child == 0:
        os._exit(pool(2).submit(lambda: 7).result(timeout=60))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_hook_of_one_copy_is_no_hook_of_another():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    calls: list[torch.nn.Module] = []
    first, second = shell(net), shell(net)
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        getattr(first[0], register)(lambda layer, *_: calls.append(layer))
    for copy in (net, second, first):
        copy(torch.ones(1, 2)).sum().backward()
    assert calls == [first[0]] * 3


def test_work_over_threads_inside_a_worker_does_not_wait_for_itself():
    def nested(items):
        for item in items:
            yield list(over_threads(iter, [item], 1))

    workers = pool(1)
    found = workers.submit(lambda: list(over_threads(nested, [1, 2], 1))).result(timeout=60)
    assert found == [[1], [2]]
