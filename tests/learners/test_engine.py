from __future__ import annotations

import logging
import re
import threading
from copy import deepcopy
from itertools import accumulate
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import CLASSES, METHODS, NETS, clusters, flattened, relative_error, smooth_mlp, unusual_episodes, unusual_net
from metabridge import Engine, Episodes, InputError, heads, meta_gradient, method, parameters
from metabridge.learners import task_gradients
from metabridge.learners.engine import MAX_CAPTURES, Mode
from metabridge.models import Network, mlp

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_gradients_in_inference_mode_raise_an_error():
    learner, net, episodes = method("maml"), smooth_mlp(), clusters((4,))
    params = parameters(learner, net)
    with torch.inference_mode(), pytest.raises(InputError, match=r"inference_mode\(\) is on.* Train outside of it"):
        Engine(learner, net)(params, episodes)


def test_workers_use_one_thread_per_core_and_restore_the_thread_count():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads_seen, barrier = set(), threading.Barrier(3)

        def loss(prediction, target):
            thread = (threading.get_ident(), torch.get_num_threads())
            if thread not in threads_seen:
                threads_seen.add(thread)
                barrier.wait(timeout=30)  # until three threads compute a task at the same time
            return (prediction - target).square().mean()

        x = torch.randn(5, 4, 2)
        net = mlp(2, 2)
        learner = method("fo-maml", loss=loss)
        Engine(learner, net, mode="workers")(parameters(learner, net), Episodes(x, x, x, x))
        assert len({thread for thread, _ in threads_seen}) == 3
        assert {threads for _, threads in threads_seen} == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gradients_reach_an_ordinary_optimizer_and_the_loss_falls():
    net, episodes = smooth_mlp(), clusters((4,))
    learner = METHODS["maml"]
    params = parameters(learner, net)
    optimizer = torch.optim.Adam(params.values(), lr=0.02)
    losses = []
    for _ in range(30):
        result = meta_gradient(learner, net, params, episodes)
        result.assign(params)
        optimizer.step()
        losses.append(float(result.loss))
    assert losses[-1] < 0.7 * losses[0]


def test_a_meta_gradient_does_not_change_the_network():
    net, episodes = smooth_mlp(), clusters((4,))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    meta_gradient(METHODS["maml"], net, parameters(METHODS["maml"], net), episodes)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_computes_the_same_gradient(mode):
    if mode == "captured" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = "cuda" if mode == "captured" else "cpu"
    learner, net, episodes = METHODS["maml"], smooth_mlp(), clusters((4,))
    params = parameters(learner, net)
    expected = Engine(learner, net, mode="loop")(params, episodes)
    on_device = {name: value.detach().to(device) for name, value in params.items()}
    engine = Engine(learner, smooth_mlp().to(device), mode=mode)
    for _ in range(2):  # captures, then replays
        actual = engine(on_device, episodes.to(device))
        assert relative_error(flattened(actual.gradients).cpu(), flattened(expected.gradients)) < 1e-9


def test_a_mode_that_the_engine_does_not_implement_raises_an_error():
    net, episodes = smooth_mlp(), clusters((4,))
    engine = Engine(METHODS["anil"], net)
    engine.mode = "new"
    with pytest.raises(AssertionError, match="new"):
        engine(parameters(METHODS["anil"], net), episodes)


def test_representations_fit_on_one_line():
    learner, net = method("maml"), mlp(1, 1)
    engine = Engine(learner, net, mode="loop", flat=True, dtype=torch.bfloat16)
    assert repr(engine) == "Engine(mlp, mode='loop', flat=True, dtype=torch.bfloat16)"
    x = torch.randn(2, 3, 1)
    gradient = Engine(learner, net)(parameters(learner, net), Episodes(x, x, x, x))
    assert re.fullmatch(r"MetaGradient\(loss=[\d.e-]+, gradients of 6 parameters\)", repr(gradient))


def test_the_captured_mode_runs_uncaptured_if_there_is_no_gpu():
    net, episodes = smooth_mlp(), clusters((4,))
    params = parameters(METHODS["anil"], net)
    captured = Engine(METHODS["anil"], net, mode="captured")(params, episodes)
    loop = Engine(METHODS["anil"], net, mode="loop")(params, episodes)
    assert relative_error(flattened(captured.gradients), flattened(loop.gradients)) < 1e-12


def peak_memory(learner, net, episodes, flat) -> int:
    """Return the largest number of bytes that are allocated at a time during a meta-gradient."""
    params = parameters(learner, net)
    engine = Engine(learner, net, mode="loop", flat=flat)
    with torch.profiler.profile(profile_memory=True) as profile:
        engine(params, episodes)
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


def test_memory_with_flat_hardly_grows_with_the_number_of_steps():
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
def test_a_replayed_capture_computes_the_gradient_for_new_tasks_and_weights(name, net_name, flat):
    case = NETS[net_name]
    learner, net = case.method(name), case.make()
    params = parameters(learner, net, classes=CLASSES)
    reference = Engine(learner, net, mode="loop")
    new_params = {n: v.detach() * 1.01 for n, v in params.items()}
    gpu_params = {n: v.detach().cuda() for n, v in params.items()}
    engine = Engine(learner, case.make().cuda(), mode="captured", flat=flat)
    engine(gpu_params, clusters(case.shape, seed=1).to("cuda"))
    for n, value in gpu_params.items():
        value.copy_(new_params[n])
    actual = engine(gpu_params, clusters(case.shape).to("cuda"))
    expected = reference(new_params, clusters(case.shape))
    assert relative_error(flattened(actual.gradients).cpu(), flattened(expected.gradients)) < 1e-9


@cuda
@pytest.mark.parametrize("name", ["maml", "nal"])
def test_alternating_batch_shapes_are_captured_once_each_with_correct_gradients(name):
    learner, net, gpu_net = METHODS[name], smooth_mlp(), smooth_mlp().cuda()
    params = parameters(learner, net)
    gpu_params = {n: v.detach().cuda() for n, v in params.items()}
    engine, reference = Engine(learner, gpu_net, mode="captured"), Engine(learner, net, mode="loop")
    captures_by_turn = []
    for turn in range(6):
        episodes = clusters((4,), tasks=3 - turn % 2, shots=2 + turn % 2, seed=turn)
        params = {n: 1.01 * v.detach() for n, v in params.items()}
        for n, copy in gpu_params.items():
            copy.copy_(params[n])
        actual = engine(gpu_params, episodes.to("cuda"))
        expected = reference(params, episodes)
        assert relative_error(flattened(actual.gradients).cpu(), flattened(expected.gradients)) < 1e-9
        captures_by_turn.append(list(engine._captures.values()))
    assert len(captures_by_turn[-1]) == 2
    assert captures_by_turn[1] == captures_by_turn[-1]


@cuda
def test_reallocated_parameters_and_too_many_shapes_free_earlier_captures():
    learner, net = METHODS["maml"], smooth_mlp().cuda()
    engine, params = Engine(learner, net), parameters(learner, net)
    for shots in range(1, MAX_CAPTURES + 2):
        engine(params, clusters((4,), shots=shots).to("cuda"))
        assert 1 <= len(engine._captures) <= MAX_CAPTURES
    engine(params, clusters((4,)).to("cuda"))
    reallocated = {n: v.detach().clone() for n, v in params.items()}
    engine(reallocated, clusters((4,)).to("cuda"))
    assert len(engine._captures) == 1


@cuda
def test_captures_replayed_on_parallel_streams_give_the_correct_gradients():
    learner, cases = METHODS["maml"], [(smooth_mlp(), clusters((4,), seed=seed)) for seed in range(6)]
    streams, engines, actual = [torch.cuda.Stream() for _ in cases], [], [[] for _ in cases]
    for stream, (net, episodes) in zip(streams, cases):
        with torch.cuda.stream(stream):
            copy = deepcopy(net).cuda()
            engines.append((Engine(learner, copy, mode="captured"), parameters(learner, copy), episodes.to("cuda")))
    for _ in range(30):
        for stream, (engine, params, episodes), gradients in zip(streams, engines, actual):
            with torch.cuda.stream(stream):
                gradients.append(flattened(engine(params, episodes).gradients))
    torch.cuda.synchronize()
    for (net, episodes), gradients, (engine, *_) in zip(cases, actual, engines):
        assert len(engine._captures) == 1
        expected = flattened(Engine(learner, net, mode="loop")(parameters(learner, net), episodes).gradients)
        assert relative_error(torch.stack(gradients).cpu(), expected.expand(30, -1)) < 1e-9


@cuda
def test_a_step_that_cannot_be_captured_runs_eagerly_with_one_warning(caplog):
    def loss(prediction, target):
        return (prediction - target).square().mean() * (1.0 if float(torch.ones(1).cuda()) else 0.0)

    x = torch.randn(3, 4, 2, device="cuda")
    net = mlp(2, 2).cuda()
    learner = method("maml", loss=loss)
    params = parameters(learner, net)
    engine = Engine(learner, net)
    with caplog.at_level(logging.WARNING, "metabridge"):
        results = [engine(params, Episodes(x, x, x, x)) for _ in range(3)]
    assert len(caplog.records) == 1
    assert torch.isfinite(results[-1].loss)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("maml", lambda e: Episodes(e.support_x, e.support_y + 3, e.query_x, e.query_y), "A label is 5, but the head"),
        ("maml", lambda e: e.to(dtype=torch.float32), "Inputs are torch.float32, but the parameters are torch.float64"),
        ("mtl", lambda e: Episodes(e.support_x, e.support_y, e.query_x, e.query_y), "episodes.classes is None"),
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
            "Targets are vectors of length 2, but the head has 3 outputs",
        ),
    ],
)
def test_unsuitable_episodes_raise_an_error_with_a_clear_message(name, change, message):
    net = smooth_mlp()
    params = parameters(METHODS[name], net, classes=CLASSES)
    with pytest.raises(InputError) as error:
        meta_gradient(METHODS[name], net, params, change(clusters((4,))))
    assert message in str(error.value)


def test_a_missing_number_of_classes_an_unknown_mode_and_unsuitable_networks_raise_errors():
    net, episodes = smooth_mlp(), clusters((4,))
    with pytest.raises(InputError, match=r"Pass classes=environment\.classes"):
        parameters(method("mtl"), net)
    with pytest.raises(InputError, match="mode is 'fast', but must be one of 'auto', 'loop'"):
        Engine(method("maml"), net, mode="fast")
    burer_monteiro, with_head_lr = method("burer-monteiro"), method("maml", lr={"head": 0.1})
    params = parameters(burer_monteiro, net, classes=CLASSES)
    with pytest.raises(InputError, match="needs a linear network with one weight matrix"):
        meta_gradient(burer_monteiro, net, params, episodes)
    with pytest.raises(InputError, match=r"none of them matches the parameter 'features\.1\.weight'"):
        meta_gradient(with_head_lr, net, params, episodes)


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


@pytest.fixture
def three_threads():
    threads_before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads_before)


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), FunctionalDropout(), nn.RReLU()])
def test_flat_raises_an_error_for_networks_with_dropout(drop):
    net = Network(nn.Sequential(nn.Linear(3, 8), drop), nn.Linear(8, 1)).train()
    learner, x = method("maml"), torch.randn(2, 4, 3)
    episodes = Episodes(x, x[..., :1], x + 1, x[..., :1])
    engine = Engine(learner, net, flat=True)
    with pytest.raises(InputError, match="draws random numbers"):
        engine(parameters(learner, net), episodes)
    net.eval()
    assert engine(parameters(learner, net), episodes).loss.isfinite()


@pytest.mark.parametrize("mode", ["auto", "workers"])
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_a_seed_determines_the_gradient_of_a_network_with_dropout_on_several_threads(three_threads, name, mode):
    net = Network(nn.Sequential(nn.Linear(4, 8), FunctionalDropout()), nn.Linear(8, 3)).double().train()
    learner, episodes = method(name), clusters((4,), tasks=6)
    params, engine = parameters(learner, net), Engine(method(name), net, mode=mode)
    results = []
    for _ in range(5):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            results.append(flattened(engine(params, episodes).gradients))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["maml", "anil", "mtl"])
def test_gradients_do_not_depend_on_the_number_of_threads_bit_for_bit(name):
    case = NETS["conv4 with batch norm"]
    learner, net = case.method(name), case.make().float()
    episodes = clusters(case.shape, tasks=7).to(dtype=torch.float32)
    params = parameters(learner, net, classes=CLASSES)
    threads_before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(Engine(learner, net, mode="workers")(params, episodes))
    finally:
        torch.set_num_threads(threads_before)
    for result in results[1:]:
        assert torch.equal(result.loss, results[0].loss)
        assert all(torch.equal(value, results[0].gradients[n]) for n, value in result.gradients.items())


@pytest.mark.parametrize("name", ["maml", "anil", "mtl"])
def test_buffers_are_updated_once_per_task_and_equally_in_every_mode(name):
    learner, episodes = METHODS[name], unusual_episodes("buffers that change")
    final_buffers = []
    for mode in ("loop", "workers", "vectorized"):
        net = unusual_net("buffers that change")
        params = parameters(learner, net, classes=CLASSES)
        Engine(learner, net, mode=mode)(params, episodes)
        final_buffers.append(dict(net.named_buffers()))
    layer = unusual_net("buffers that change").features.train()
    for x in (episodes if learner.split else episodes.without_split()).support_x:
        layer(x)
    for buffers in final_buffers:
        torch.testing.assert_close(buffers["features.mean"], layer.mean)
        assert buffers["features.calls"] == len(episodes)
    net = unusual_net("buffers that change").eval()
    Engine(learner, net)(params, episodes)
    assert not any(value.any() for value in net.buffers())


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_integer_inputs_are_not_rounded_in_low_precision(name):
    learner, net = method(name), unusual_net("embedding").float()
    # bfloat16 would round these numbers to multiples of 4
    tokens = torch.tensor([[[999, 999, 997]], [[995, 993, 991]]])
    episodes = Episodes(tokens, torch.zeros(2, 1, dtype=torch.int64), tokens, torch.ones(2, 1, dtype=torch.int64))
    for mode in ("loop", "workers", "vectorized"):
        result = Engine(learner, net, mode=mode, dtype=torch.bfloat16)(parameters(learner, net), episodes)
        rows = result.gradients["features.table.weight"].abs().sum(1).nonzero().flatten()
        assert rows.tolist() == [991, 993, 995, 997, 999]
        assert result.gradients["features.table.weight"].dtype == torch.float32


def test_whole_numbers_that_bfloat16_rounds_and_integer_inputs_of_float_networks_raise_errors():
    x, y = torch.tensor([[[999.0, 3.0]]]), torch.zeros(1, 1, dtype=torch.int64)
    net, learner = mlp(2, 3), method("maml")
    params = parameters(learner, net)
    with pytest.raises(InputError, match=r"integers such as 999, which torch\.bfloat16 rounds to 1000"):
        Engine(learner, net, dtype=torch.bfloat16)(params, Episodes(x, y, x, y))
    for accepted_x in (x / 999, x.clamp(max=256)):
        episodes = Episodes(accepted_x, y, accepted_x, y)
        assert Engine(learner, net, dtype=torch.bfloat16)(params, episodes).loss.isfinite()
    with pytest.raises(InputError, match=r"Inputs are torch\.int64, but this network takes floating-point inputs"):
        Engine(learner, net)(params, Episodes(x.long(), y, x.long(), y))


def test_a_network_that_vmap_cannot_run_is_computed_task_by_task_with_one_warning(caplog):
    class Branching(nn.Module):
        def forward(self, x):
            return x if float(x.detach().sum()) > 1e9 else x.tanh()

    net, episodes = Network(nn.Sequential(nn.Linear(4, 5), Branching()), nn.Linear(5, 3)).double(), clusters((4,))
    learner = method("maml")
    params = parameters(learner, net)
    task_gradients._warn_about_loop.cache_clear()
    with caplog.at_level(logging.WARNING, "metabridge"):
        actual, again = (Engine(learner, net, mode="vectorized")(params, episodes) for _ in range(2))
    assert ["cannot vectorize this network" in record.message for record in caplog.records] == [True]
    expected = Engine(learner, net, mode="loop")(params, episodes)
    for result in (actual, again):
        assert relative_error(flattened(result.gradients), flattened(expected.gradients)) < 1e-12


def test_one_classifier_over_all_classes_raises_an_error_for_real_targets():
    learner, net = method("rfs", test_solver=heads.RidgeClassifier()), mlp(2, 1)
    x, y = torch.randn(3, 4, 2), torch.randn(3, 4, 1)
    episodes = Episodes(x, y, x, y, classes=torch.tensor([[0], [1], [2]]))
    with pytest.raises(InputError, match="one classifier over all classes, but the targets are real-valued"):
        Engine(learner, net)(parameters(learner, net, classes=7), episodes)


class _ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x.sub_(0.5)))


def test_observing_a_network_does_not_change_its_inputs():
    net = Network(_ChangesItsInput(), nn.Linear(5, 3)).double()
    learner, episodes = METHODS["anil"], clusters((4,))
    engine, params = Engine(learner, net, mode="loop"), parameters(learner, net)
    first, second = (engine(params, episodes.clone()).loss for _ in range(2))
    assert torch.equal(first, second)


def test_a_network_is_observed_with_the_parameters_of_the_call():
    net, learner, episodes = smooth_mlp(), METHODS["maml"], clusters((4,))
    params = parameters(learner, net)
    expected = Engine(learner, net)(params, episodes)
    actual = Engine(learner, deepcopy(net).float())(params, episodes)
    assert torch.equal(actual.loss, expected.loss)


def test_switching_a_layer_to_training_mode_is_noticed():
    net = Network(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5).eval()), nn.Linear(6, 3)).double()
    learner, episodes = METHODS["maml"], clusters((4,))
    engine, params = Engine(learner, net, flat=True), parameters(learner, net)
    engine(params, episodes)
    net.features[1].train()
    with pytest.raises(InputError, match="flat computes every inner step twice"):
        engine(params, episodes)


def test_a_submodule_of_the_features_named_head_is_not_confused_with_the_head_of_the_network():
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.head(x)
            if self.training:
                self.seen = x.detach().mean(0)
            return x

    net = Network(Features(), nn.Linear(4, 4)).double()
    learner, episodes = METHODS["anil"], clusters((4,), tasks=1)
    Engine(learner, net, mode="loop")(parameters(learner, net), episodes)
    assert torch.allclose(net.features.seen, net.features.head(episodes.support_x[0]).mean(0))


def test_query_indices_that_bfloat16_rounds_raise_an_error():
    net, learner = smooth_mlp().float(), METHODS["anil"]
    x = torch.ones(1, 3, 4)
    episodes = Episodes(x, torch.arange(3)[None], x * 999, torch.arange(3)[None])
    with pytest.raises(InputError, match="integers such as 999"):
        Engine(learner, net, dtype=torch.bfloat16)(parameters(learner, net), episodes)
