from __future__ import annotations

import logging
import threading
from copy import deepcopy
from itertools import accumulate

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import CLASSES, METHODS, NETS, clusters, flattened, odd_episodes, odd_net, relative, smooth_mlp
from metabridge import Engine, Episodes, InputError, heads, meta_gradient, method, parameters
from metabridge.learners import task_gradients
from metabridge.learners.engine import MOST_CAPTURES
from metabridge.models import Network, mlp

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_gradients_in_inference_mode_are_refused():
    chosen, net, episodes = method("maml"), smooth_mlp(), clusters((4,))
    params = parameters(chosen, net)
    with torch.inference_mode(), pytest.raises(InputError, match=r"inference_mode\(\) is on.* Train outside of it"):
        Engine(chosen, net)(params, episodes)


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
    for shots in range(1, MOST_CAPTURES + 2):
        engine(params, clusters((4,), shots=shots).to("cuda"))
        assert 1 <= len(engine._captures) <= MOST_CAPTURES
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


class FunctionalDropout(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.3, self.training)


@pytest.fixture
def three_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), FunctionalDropout(), nn.RReLU()])
def test_memory_flat_steps_refuse_to_drop_at_random(drop):
    net = Network(nn.Sequential(nn.Linear(3, 8), drop), nn.Linear(8, 1)).train()
    chosen, x = method("maml"), torch.randn(2, 4, 3)
    episodes = Episodes(x, x[..., :1], x + 1, x[..., :1])
    engine = Engine(chosen, net, flat=True)
    with pytest.raises(InputError, match="draws random numbers"):
        engine(parameters(chosen, net), episodes)
    net.eval()
    assert engine(parameters(chosen, net), episodes).loss.isfinite()


@pytest.mark.parametrize("mode", ["auto", "workers"])
@pytest.mark.parametrize("name", ["maml", "anil"])
def test_one_seed_gives_one_gradient_on_several_threads_whatever_drops(three_threads, name, mode):
    net = Network(nn.Sequential(nn.Linear(4, 8), FunctionalDropout()), nn.Linear(8, 3)).double().train()
    chosen, episodes = method(name), clusters((4,), tasks=6)
    params, engine = parameters(chosen, net), Engine(method(name), net, mode=mode)
    results = []
    for _ in range(5):
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            results.append(flattened(engine(params, episodes).gradients))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["maml", "anil", "mtl"])
def test_gradients_are_the_same_bit_for_bit_on_any_number_of_threads(name):
    case = NETS["conv4 with batch norm"]
    chosen, net = case.method(name), case.make().float()
    episodes = clusters(case.shape, tasks=7).to(dtype=torch.float32)
    params = parameters(chosen, net, classes=CLASSES)
    usual, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            results.append(Engine(chosen, net, mode="workers")(params, episodes))
    finally:
        torch.set_num_threads(usual)
    for result in results[1:]:
        assert torch.equal(result.loss, results[0].loss)
        assert all(torch.equal(value, results[0].gradients[n]) for n, value in result.gradients.items())


@pytest.mark.parametrize("name", ["maml", "anil", "mtl"])
def test_buffers_move_once_for_every_task_and_alike_in_every_mode(name):
    chosen, episodes = METHODS[name], odd_episodes("buffers that move")
    ends = []
    for mode in ("loop", "workers", "vectorised"):
        net = odd_net("buffers that move")
        params = parameters(chosen, net, classes=CLASSES)
        Engine(chosen, net, mode=mode)(params, episodes)
        ends.append(dict(net.named_buffers()))
    layer = odd_net("buffers that move").features.train()
    for x in (episodes if chosen.split else episodes.without_split()).support_x:
        layer(x)
    for end in ends:
        torch.testing.assert_close(end["features.mean"], layer.mean)
        assert end["features.calls"] == len(episodes)
    net = odd_net("buffers that move").eval()
    Engine(chosen, net)(params, episodes)
    assert not any(value.any() for value in net.buffers())


@pytest.mark.parametrize("name", ["maml", "anil"])
def test_integer_inputs_are_not_rounded_in_low_precision(name):
    chosen, net = method(name), odd_net("embedding").float()
    tokens = torch.tensor([[[999, 999, 997]], [[995, 993, 991]]])
    episodes = Episodes(tokens, torch.zeros(2, 1, dtype=torch.int64), tokens, torch.ones(2, 1, dtype=torch.int64))
    for mode in ("loop", "workers", "vectorised"):
        result = Engine(chosen, net, mode=mode, dtype=torch.bfloat16)(parameters(chosen, net), episodes)
        rows = result.gradients["features.table.weight"].abs().sum(1).nonzero().flatten()
        assert rows.tolist() == [991, 993, 995, 997, 999]
        assert result.gradients["features.table.weight"].dtype == torch.float32


def test_whole_numbers_that_low_precision_would_round_and_integers_for_a_net_of_floats_are_refused():
    x, y = torch.tensor([[[999.0, 3.0]]]), torch.zeros(1, 1, dtype=torch.int64)
    net, chosen = mlp(2, 3), method("maml")
    params = parameters(chosen, net)
    with pytest.raises(InputError, match=r"whole numbers such as 999, which torch\.bfloat16 rounds to 1000"):
        Engine(chosen, net, dtype=torch.bfloat16)(params, Episodes(x, y, x, y))
    for fine in (x / 999, x.clamp(max=256)):
        assert Engine(chosen, net, dtype=torch.bfloat16)(params, Episodes(fine, y, fine, y)).loss.isfinite()
    with pytest.raises(InputError, match=r"Inputs are torch\.int64, but this network takes floating-point ones"):
        Engine(chosen, net)(params, Episodes(x.long(), y, x.long(), y))


def test_a_net_that_pytorch_cannot_vectorise_runs_task_by_task_with_one_log_line(caplog):
    class Unusual(nn.Module):
        def forward(self, x):
            return x if float(x.detach().sum()) > 1e9 else x.tanh()

    net, episodes = Network(nn.Sequential(nn.Linear(4, 5), Unusual()), nn.Linear(5, 3)).double(), clusters((4,))
    chosen = method("maml")
    params = parameters(chosen, net)
    task_gradients._warn_of_loop.cache_clear()
    with caplog.at_level(logging.WARNING, "metabridge"):
        found, again = (Engine(chosen, net, mode="vectorised")(params, episodes) for _ in range(2))
    assert ["cannot vectorise this network" in record.message for record in caplog.records] == [True]
    expected = Engine(chosen, net, mode="loop")(params, episodes)
    for result in (found, again):
        assert relative(flattened(result.gradients), flattened(expected.gradients)) < 1e-12


def test_one_classifier_over_all_classes_refuses_values():
    chosen, net = method("rfs", test=heads.RidgeClassifier()), mlp(2, 1)
    x, y = torch.randn(3, 4, 2), torch.randn(3, 4, 1)
    episodes = Episodes(x, y, x, y, classes=torch.tensor([[0], [1], [2]]))
    with pytest.raises(InputError, match="one classifier over all classes, but the targets are values"):
        Engine(chosen, net)(parameters(chosen, net, classes=7), episodes)


class _ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x.sub_(0.5)))


def test_looking_at_a_network_leaves_its_inputs_alone():
    net = Network(_ChangesItsInput(), nn.Linear(5, 3)).double()
    chosen, episodes = METHODS["anil"], clusters((4,))
    engine, params = Engine(chosen, net, mode="loop"), parameters(chosen, net)
    first, second = (engine(params, episodes.clone()).loss for _ in range(2))
    assert torch.equal(first, second)


def test_a_network_is_looked_at_with_the_parameters_that_are_given():
    net, chosen, episodes = smooth_mlp(), METHODS["maml"], clusters((4,))
    params = parameters(chosen, net)
    expected = Engine(chosen, net)(params, episodes)
    found = Engine(chosen, deepcopy(net).float())(params, episodes)
    assert torch.equal(found.loss, expected.loss)


def test_a_layer_that_is_switched_to_training_is_noticed():
    net = Network(nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5).eval()), nn.Linear(6, 3)).double()
    chosen, episodes = METHODS["maml"], clusters((4,))
    engine, params = Engine(chosen, net, flat=True), parameters(chosen, net)
    engine(params, episodes)
    net.features[1].train()
    with pytest.raises(InputError, match="flat computes every inner step twice"):
        engine(params, episodes)


def test_a_submodule_named_head_keeps_its_own_weights():
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
    chosen, episodes = METHODS["anil"], clusters((4,), tasks=1)
    Engine(chosen, net, mode="loop")(parameters(chosen, net), episodes)
    assert torch.allclose(net.features.seen, net.features.head(episodes.support_x[0]).mean(0))


def test_query_indices_that_low_precision_would_round_are_refused():
    net, chosen = smooth_mlp().float(), METHODS["anil"]
    x = torch.ones(1, 3, 4)
    episodes = Episodes(x, torch.arange(3)[None], x * 999, torch.arange(3)[None])
    with pytest.raises(InputError, match="whole numbers such as 999"):
        Engine(chosen, net, dtype=torch.bfloat16)(parameters(chosen, net), episodes)
