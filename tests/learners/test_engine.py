from __future__ import annotations

import logging
import threading
from copy import deepcopy
from itertools import accumulate

import pytest
import torch
from torch import nn

from cases import CLASSES, METHODS, NETS, clusters, flattened, relative, smooth_mlp
from metabridge import Engine, Episodes, InputError, meta_gradient, method, parameters
from metabridge.learners import heads
from metabridge.learners.engine import CAPTURES
from metabridge.models import Network, mlp

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_workers_use_a_thread_a_core_and_leave_pytorchs_threads_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        seen, all_here = set(), threading.Barrier(3)

        def loss(prediction, target):
            own = (threading.get_ident(), torch.get_num_threads())
            if own not in seen:
                seen.add(own)
                all_here.wait(timeout=30)  # else a quick thread might do a slow one's share
            return (prediction - target).square().mean()

        x = torch.randn(5, 4, 2)
        net = mlp(2, 2)
        chosen = method("fo-maml", loss=loss)
        Engine(chosen, net, mode="workers")(parameters(chosen, net), Episodes(x, x, x, x))
        assert len({thread for thread, _ in seen}) == 3
        assert {threads for _, threads in seen} == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gradients_reach_an_ordinary_optimizer_and_the_loss_falls():
    net, episodes = smooth_mlp(), clusters((4,))
    chosen = METHODS["maml"]
    params = parameters(chosen, net)
    optimizer = torch.optim.Adam(params.values(), lr=0.02)
    losses = []
    for _ in range(30):
        result = meta_gradient(chosen, net, params, episodes)
        result.assign(params)
        optimizer.step()
        losses.append(float(result.loss))
    assert losses[-1] < 0.7 * losses[0]


def test_the_network_given_is_not_changed_by_a_meta_gradient():
    net, episodes = smooth_mlp(), clusters((4,))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    meta_gradient(METHODS["maml"], net, parameters(METHODS["maml"], net), episodes)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


def test_without_a_gpu_a_captured_engine_runs_the_same_step_uncaptured():
    net, episodes = smooth_mlp(), clusters((4,))
    params = parameters(METHODS["anil"], net)
    captured = Engine(METHODS["anil"], net, mode="captured")(params, episodes)
    loop = Engine(METHODS["anil"], net, mode="loop")(params, episodes)
    assert relative(flattened(captured.gradients), flattened(loop.gradients)) < 1e-12


def peak_memory(chosen, net, episodes, flat) -> int:
    """The most bytes that are allocated at any moment of a meta-gradient."""
    params = parameters(chosen, net)
    engine = Engine(chosen, net, mode="loop", flat=flat)
    with torch.profiler.profile(profile_memory=True) as profile:
        engine(params, episodes)
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def test_memory_of_the_flat_mode_does_not_grow_with_the_steps():
    case = NETS["conv4 with batch norm"]
    net, episodes = case.make(), clusters(case.shape, tasks=1, shots=10)
    peaks = {
        (flat, steps): peak_memory(method("maml", steps=steps), net, episodes, flat)
        for flat in (False, True)
        for steps in (2, 20)
    }
    assert peaks[True, 20] < 1.3 * peaks[True, 2]
    assert peaks[False, 20] > 5 * peaks[False, 2]


@cuda
@pytest.mark.parametrize("net_name", NETS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("flat", [False, True])
def test_a_replayed_capture_gives_the_gradient_of_new_tasks_and_new_weights(name, net_name, flat):
    case = NETS[net_name]
    chosen, net = case.method(name), case.make()
    params = parameters(chosen, net, classes=CLASSES)
    reference = Engine(chosen, net, mode="loop")
    moved = {n: v.detach() * 1.01 for n, v in params.items()}
    on_gpu = {n: v.detach().cuda() for n, v in params.items()}
    engine = Engine(chosen, case.make().cuda(), mode="captured", flat=flat)
    engine(on_gpu, clusters(case.shape, seed=1).to("cuda"))
    for n, value in on_gpu.items():
        value.copy_(moved[n])
    found = engine(on_gpu, clusters(case.shape).to("cuda"))
    expected = reference(moved, clusters(case.shape))
    assert relative(flattened(found.gradients).cpu(), flattened(expected.gradients)) < 1e-9


@cuda
@pytest.mark.parametrize("name", ["maml", "nal"])
def test_batches_of_two_shapes_in_turn_are_recorded_once_each_and_give_their_own_gradients(name):
    chosen, net, on_gpu = METHODS[name], smooth_mlp(), smooth_mlp().cuda()
    params = parameters(chosen, net)
    copies = {n: v.detach().cuda() for n, v in params.items()}
    engine, reference = Engine(chosen, on_gpu, mode="captured"), Engine(chosen, net, mode="loop")
    recorded = []
    for turn in range(6):
        episodes = clusters((4,), tasks=3 - turn % 2, shots=2 + turn % 2, seed=turn)
        params = {n: 1.01 * v.detach() for n, v in params.items()}
        for n, copy in copies.items():
            copy.copy_(params[n])
        found = engine(copies, episodes.to("cuda"))
        expected = reference(params, episodes)
        assert relative(flattened(found.gradients).cpu(), flattened(expected.gradients)) < 1e-9
        recorded.append(list(engine._captures.values()))
    assert len(recorded[-1]) == 2
    assert recorded[1] == recorded[-1]


@cuda
def test_parameters_that_move_and_too_many_shapes_free_the_captures_before():
    chosen, net = METHODS["maml"], smooth_mlp().cuda()
    engine, params = Engine(chosen, net), parameters(chosen, net)
    for shots in range(1, CAPTURES + 2):
        engine(params, clusters((4,), shots=shots).to("cuda"))
        assert 1 <= len(engine._captures) <= CAPTURES
    engine(params, clusters((4,)).to("cuda"))
    moved = {n: v.detach().clone() for n, v in params.items()}
    engine(moved, clusters((4,)).to("cuda"))
    assert len(engine._captures) == 1


@cuda
def test_steps_recorded_and_replayed_on_streams_side_by_side_give_the_gradients_of_each():
    chosen, cases = METHODS["maml"], [(smooth_mlp(), clusters((4,), seed=seed)) for seed in range(6)]
    streams, engines, found = [torch.cuda.Stream() for _ in cases], [], [[] for _ in cases]
    for stream, (net, episodes) in zip(streams, cases):
        with torch.cuda.stream(stream):
            own = deepcopy(net).cuda()
            engines.append((Engine(chosen, own, mode="captured"), parameters(chosen, own), episodes.to("cuda")))
    for _ in range(30):
        for stream, (engine, params, episodes), mine in zip(streams, engines, found):
            with torch.cuda.stream(stream):
                mine.append(flattened(engine(params, episodes).gradients))
    torch.cuda.synchronize()
    for (net, episodes), mine, (engine, *_) in zip(cases, found, engines):
        assert len(engine._captures) == 1
        expected = flattened(Engine(chosen, net, mode="loop")(parameters(chosen, net), episodes).gradients)
        assert relative(torch.stack(mine).cpu(), expected.expand(30, -1)) < 1e-9


@cuda
def test_a_step_that_cannot_be_captured_runs_eagerly_with_one_log_line(caplog):
    def loss(prediction, target):
        return (prediction - target).square().mean() * (1.0 if float(torch.ones(1).cuda()) else 0.0)

    x = torch.randn(3, 4, 2, device="cuda")
    net = mlp(2, 2).cuda()
    chosen = method("maml", loss=loss)
    params = parameters(chosen, net)
    engine = Engine(chosen, net)
    with caplog.at_level(logging.WARNING, "metabridge"):
        results = [engine(params, Episodes(x, x, x, x)) for _ in range(3)]
    assert len(caplog.records) == 1
    assert torch.isfinite(results[-1].loss)


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("maml", lambda e: Episodes(e.support_x, e.support_y + 3, e.query_x, e.query_y), "A label is 5, but the head"),
        ("maml", lambda e: e.to(dtype=torch.float32), "Inputs are torch.float32, but the parameters are torch.float64"),
        ("mtl", lambda e: Episodes(e.support_x, e.support_y, e.query_x, e.query_y), "do not say which classes"),
        (
            "rfs",
            lambda e: Episodes(e.support_x, e.support_y, e.query_x, e.query_y, e.classes + 4),
            "but there are 6 head rows",
        ),
        (
            "metaoptnet",
            lambda e: Episodes(e.support_x, e.support_x[..., :3], e.query_x, e.query_x[..., :3]),
            "needs class labels",
        ),
        (
            "anil",
            lambda e: Episodes(e.support_x, e.support_x[..., :2], e.query_x, e.query_x[..., :2]),
            "Targets have 2 values each, but the head has 3 outputs",
        ),
    ],
)
def test_episodes_that_do_not_fit_are_refused_with_a_sentence(name, change, sentence):
    net = smooth_mlp()
    params = parameters(METHODS[name], net, classes=CLASSES)
    with pytest.raises(InputError) as error:
        meta_gradient(METHODS[name], net, params, change(clusters((4,))))
    assert sentence in str(error.value)


def test_missing_rows_unknown_modes_and_unfit_bodies_are_refused():
    net, episodes = smooth_mlp(), clusters((4,))
    with pytest.raises(InputError, match=r"Give classes=environment\.classes"):
        parameters(method("mtl"), net)
    with pytest.raises(InputError, match="mode is 'fast', but must be one of 'auto', 'loop'"):
        Engine(method("maml"), net, mode="fast")
    linear, partial = method("burer-monteiro"), method("maml", lr={"head": 0.1})
    rows = parameters(linear, net, classes=CLASSES)
    with pytest.raises(InputError, match="factorises a linear net with one weight matrix"):
        meta_gradient(linear, net, rows, episodes)
    with pytest.raises(InputError, match=r"none of them covers the parameter 'features\.1\.weight'"):
        meta_gradient(partial, net, rows, episodes)


def test_memory_flat_steps_refuse_to_drop_at_random():
    net = Network(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.3)), nn.Linear(8, 1)).train()
    chosen, x = method("maml"), torch.randn(2, 4, 3)
    episodes = Episodes(x, x[..., :1], x + 1, x[..., :1])
    engine = Engine(chosen, net, flat=True)
    with pytest.raises(InputError, match="drops at random in training"):
        engine(parameters(chosen, net), episodes)
    net.eval()
    assert engine(parameters(chosen, net), episodes).loss.isfinite()


def test_one_classifier_over_all_classes_refuses_values():
    chosen, net = method("rfs", test=heads.Ridge()), mlp(2, 1)
    x, y = torch.randn(3, 4, 2), torch.randn(3, 4, 1)
    episodes = Episodes(x, y, x, y, classes=torch.tensor([[0], [1], [2]]))
    with pytest.raises(InputError, match="one classifier over all classes, but the targets are values"):
        Engine(chosen, net)(parameters(chosen, net, classes=7), episodes)
