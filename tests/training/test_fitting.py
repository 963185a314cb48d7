from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from cases import flattened
from metabridge import Engine, Episodes, InputError, Score, evaluate, fit, method, parameters
from metabridge.environments import SharedRepresentation, Sinusoid
from metabridge.models import Network, conv4, mlp, resnet12
from metabridge.schedules import Cosine
from metabridge.training import Model, Point, load, trainer
from metabridge.training.checkpoint import RunFolder


@pytest.fixture(scope="module")
def tasks(glyphs):
    return {
        split: glyphs.tasks(split, queries=5, superclass="different" if split == "test" else "any")
        for split in ("train", "validation", "test")
    }


def test_training_on_sinusoids_beats_the_untrained_net():
    learner, net = method("maml", steps=3, lr=0.02), mlp(1, 1)
    before = evaluate(Model(learner, net, parameters(learner, net)), Sinusoid(), tasks=100)
    run = fit(net, learner, Sinusoid(), iterations=100, batch_size=8, lr=5e-3, progress=False)
    after = evaluate(run, Sinusoid(), tasks=100)
    assert after.metric == "squared error"
    assert after.beats(before)
    assert after.mean + after.ci95 < before.mean - before.ci95


@pytest.mark.parametrize(
    ("name", "iterations", "batch", "options"),
    [("anil", 60, 4, {"lr": 0.1}), ("r2d2", 40, 4, {}), ("rfs", 100, 1, {})],
)
def test_training_on_glyphs_beats_the_untrained_net(glyphs, tasks, name, iterations, batch, options):
    learner, net = method(name, **options), conv4(1, 28)
    train = glyphs.batches("train", size=128) if name == "rfs" else tasks["train"]
    untrained = Model(learner, net, parameters(learner, net, classes=train.classes))
    before = evaluate(untrained, tasks["test"], tasks=100)
    run = fit(net, learner, train, iterations=iterations, batch_size=batch, lr=3e-3, progress=False)
    after = evaluate(run, tasks["test"], tasks=100)
    assert after.mean - after.ci95 > before.mean + before.ci95


def test_a_schedule_is_accepted_by_name():
    def trained_weights(schedule):
        options = {"iterations": 3, "mode": "loop", "progress": False}
        return flattened(fit(mlp(1, 1), method("maml"), Sinusoid(), schedule=schedule, **options).params)

    assert torch.equal(trained_weights("cosine"), trained_weights(Cosine()))
    assert not torch.equal(trained_weights("cosine"), trained_weights("constant"))
    with pytest.raises(InputError, match="schedule is 'linear', but must be one of constant, step, cosine, plateau"):
        trained_weights("linear")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda images: fit(mlp(1, 1), method("maml"), images),
            r"environment is a LabeledImages.*images\.tasks\('train",
        ),
        (lambda images: fit(mlp(1, 1), method("maml"), Sinusoid), "environment is the class Sinusoid"),
        (lambda images: fit(mlp(1, 1), method("maml"), Sinusoid(), validate=images), "validate is a LabeledImages"),
        (lambda images: fit(nn.Linear(1, 1), method("maml"), Sinusoid()), r"net is a Linear.*Network\.around\("),
        (lambda images: evaluate(mlp(1, 1), Sinusoid()), "model is a Network.*Pass the run that fit returns"),
        (lambda images: evaluate(untrained_model(), images), "environment is a LabeledImages"),
        (lambda images: evaluate(untrained_model(), 5), r"environment is an int.*such as Sinusoid\(\)"),
    ],
)
def test_an_argument_of_the_wrong_type_is_rejected(glyphs, call, message):
    with pytest.raises(InputError, match=message):
        call(glyphs)


def untrained_model():
    maml, net = method("maml"), mlp(1, 1)
    return Model(maml, net, parameters(maml, net))


def test_notebooks_show_a_run_as_a_table():
    options = {"iterations": 4, "validate_tasks": 2, "progress": False}
    run = fit(mlp(1, 1), method("maml", steps=1), Sinusoid(), validate=Sinusoid(), **options)
    html = run._repr_html_()
    assert "<th>method</th><td>Method(adapts=&#x27;all&#x27;, inner=GradientDescent(steps=1" in html
    assert "<th>model</th><td>mlp</td>" in html
    assert "<th>steps</th><td>4 (finished)</td>" in html
    assert f"<th>best validation score</th><td>{run.best}</td>" in html
    assert f"<th>training time</th><td>{run.seconds:.3g} s</td>" in html
    unfinished = replace(run, curve=(Point(1000, 1.0, 0.5, None),), finished=False)
    assert "<th>steps</th><td>1,000 (unfinished)</td>" in unfinished._repr_html_()
    assert "<th>best validation score</th><td>none</td>" in unfinished._repr_html_()


def test_the_seed_determines_the_weights():
    def weights(seed):
        run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=5, seed=seed, progress=False, mode="loop")
        return run.params["head.weight"]

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize("drop_options", [{"drop_rate": 0.3}, {"drop_rate": 0.0, "dropout": 0.3}])
def test_the_seed_determines_the_weights_with_dropout_and_many_threads(monkeypatch, drop_options):
    # so that the rate of DropBlock increases from the first step
    monkeypatch.setattr("metabridge.training.trainer.DROP_RATE_STEPS", 1)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    x = torch.randn(8, 3, 1, 16, 16, generator=torch.Generator().manual_seed(0))

    class NoiseTasks:
        outputs = 3

        def sample(self, tasks, generator):
            labels = torch.arange(3).expand(tasks, 3)
            return Episodes(x[:tasks], labels, x[:tasks].flip(0), labels)

    def weights():
        net = resnet12(1, 16, 3, widths=(4, 4, 4, 4), statistics="batch", **drop_options)
        return flattened(fit(net, method("anil"), NoiseTasks(), iterations=3, batch_size=8, progress=False).params)

    try:
        first = weights()
        assert all(torch.equal(weights(), first) for _ in range(2))
    finally:
        torch.set_num_threads(num_threads)


def test_the_best_parameters_are_kept_and_copied_into_the_network():
    """The learning rate is so large that the last validation is not the best."""
    net = mlp(1, 1)
    run = fit(
        net,
        method("maml", steps=1, lr=1e-3),
        Sinusoid(),
        validate=Sinusoid(),
        iterations=20,
        lr=3.0,
        validate_every=1,
        validate_tasks=50,
        progress=False,
    )
    scores = [point.score.mean for point in run.curve]
    assert scores.index(min(scores)) < len(scores) - 1
    assert evaluate(run, Sinusoid(), tasks=50).mean == pytest.approx(min(scores), rel=1e-5)
    assert all(torch.equal(value, run.params[name]) for name, value in net.named_parameters())


def test_running_statistics_are_estimated_before_evaluation(tasks):
    net = conv4(1, 28, statistics="running")
    learner = method("r2d2")
    with pytest.raises(InputError, match="running statistics still have their initial values"):
        evaluate(Model(learner, net, parameters(learner, net)), tasks["test"], tasks=2)
    run = fit(net, learner, tasks["train"], iterations=20, batch_size=2, progress=False)
    assert evaluate(run, tasks["test"], tasks=50).mean > 0.4  # chance is 0.2
    episodes = tasks["test"].sample(1, torch.Generator().manual_seed(0))
    prediction_of_first_query = run.predict(episodes)[0, :1]
    one_query = type(episodes)(episodes.support_x, episodes.support_y, episodes.query_x[:, :1], episodes.query_y[:, :1])
    # predictions do not depend on other queries
    assert torch.allclose(run.predict(one_query)[0], prediction_of_first_query, atol=1e-4)


def test_a_loss_that_is_not_finite_raises_an_error():
    with pytest.raises(InputError, match=r"The loss became (nan|inf) at iteration \d+. Lower lr \(now 1e\+20\)"):
        fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=20, lr=1e20, progress=False)


def test_between_validations_a_run_is_saved_every_minute(tmp_path, monkeypatch):
    environment, calls = Sinusoid(), []
    sample = Sinusoid.sample

    def interrupted_sample(self, tasks, generator):
        calls.append(tasks)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return sample(self, tasks, generator)

    monkeypatch.setattr(Sinusoid, "sample", interrupted_sample)
    for save_seconds, saved_iteration in ((1e9, None), (0.0, 3)):
        monkeypatch.setattr(trainer, "SAVE_SECONDS", save_seconds)
        calls.clear()
        out = tmp_path / f"{save_seconds} seconds"
        with pytest.raises(KeyboardInterrupt):
            fit(mlp(1, 1), method("maml"), environment, iterations=100, out=out, progress=False)
        state = RunFolder(out).read("state")
        assert (None if state is None else state[1]["iteration"]) == saved_iteration


def test_every_validation_is_printed_to_stderr_if_stderr_is_not_a_terminal(capsys):
    options = {"validate": Sinusoid(), "iterations": 4, "validate_every": 2, "validate_tasks": 2}
    fit(mlp(1, 1), method("maml"), Sinusoid(), **options, name="training")
    stdout, stderr = capsys.readouterr()
    assert stdout == ""
    assert [line.split(":")[0] for line in stderr.splitlines() if "validation" in line][:2] == [
        "training 2/4",
        "training 4/4",
    ]


def test_inputs_of_another_shape_than_the_networks_raise_an_error(tasks):
    with pytest.raises(InputError, match=r"shape \(1,\), but the network was built with inputs=2."):
        fit(mlp(2, 1), method("maml"), Sinusoid(), progress=False)
    with pytest.raises(InputError, match=r"shape \(1, 28, 28\), but the network was built with channels=3."):
        fit(conv4(3, 28), method("anil"), tasks["train"], progress=False)


def test_a_method_name_instead_of_a_method_raises_an_error():
    with pytest.raises(InputError, match=r"method is 'anil', but must be a Method. Use metabridge.method\('anil'\)."):
        fit(mlp(1, 1), "anil", Sinusoid())


def test_invalid_counts_raise_an_error():
    with pytest.raises(InputError, match="iterations is 0"):
        fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=0)
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=1, progress=False)
    with pytest.raises(InputError, match="a confidence interval needs at least 2"):
        evaluate(run, Sinusoid(), tasks=1)


@pytest.fixture
def fixed_scores(monkeypatch):
    """Let validations return fixed scores, and record the weights of each evaluated head."""

    def set_scores(means: list[float], metric: str = "accuracy") -> list[torch.Tensor]:
        evaluated_heads: list[torch.Tensor] = []

        def fixed_score(model, *_, **__) -> Score:
            evaluated_heads.append(model.params["head.weight"].detach().clone())
            return Score(means[len(evaluated_heads) - 1], 0.01, 10, torch.empty(0), metric)

        monkeypatch.setattr("metabridge.training.trainer.evaluate", fixed_score)
        return evaluated_heads

    return set_scores


@pytest.mark.parametrize(
    ("means", "metric", "patience", "num_validations", "best_index"),
    [
        ([0.5, 0.6, 0.6, 0.55, 0.9, 0.9], "accuracy", 1, 4, 1),  # a score equal to the best is not a new best score
        ([0.5, 0.6, 0.55, 0.7, 0.6, 0.6], "accuracy", 1, 6, 3),
        ([0.5, 0.4, 0.9, 0.9, 0.9, 0.9], "accuracy", 0, 2, 0),
        ([0.5, 0.4, 0.3, 0.2, 0.1, 0.0], "accuracy", None, 6, 0),
        ([5.0, 4.0, 4.5, 4.2, 1.0, 1.0], "squared error", 1, 4, 1),
    ],
)
def test_training_stops_after_more_than_patience_validations_without_a_new_best_score(
    fixed_scores, means, metric, patience, num_validations, best_index
):
    evaluated_heads = fixed_scores(means, metric)
    options = {"iterations": 12, "validate_every": 2, "patience": patience, "progress": False}
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), validate=Sinusoid(), **options)
    assert [point.iteration for point in run.curve] == list(range(2, 2 * num_validations + 1, 2))
    assert run.finished
    assert run.best.mean == means[best_index]
    assert torch.equal(run.params["head.weight"], evaluated_heads[best_index])
    assert not torch.equal(evaluated_heads[best_index], evaluated_heads[best_index - 1])


def test_the_learning_curve_has_the_mean_loss_since_the_previous_point(monkeypatch):
    losses = []

    class RecordingEngine(Engine):
        def __call__(self, params, episodes):
            result = super().__call__(params, episodes)
            losses.append(float(result.loss))
            return result

    monkeypatch.setattr("metabridge.training.trainer.Engine", RecordingEngine)
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=7, validate_every=3, progress=False)
    means = [sum(losses[:3]) / 3, sum(losses[3:6]) / 3, losses[6]]
    assert [point.loss for point in run.curve] == pytest.approx(means, rel=1e-5)
    assert [point.iteration for point in run.curve] == [3, 6, 7]


@pytest.mark.parametrize("name", ["maml", "anil", "mtl", "r2d2"])
def test_a_step_in_bfloat16_has_nearly_the_same_loss_and_direction_as_in_float32(tasks, name):
    learner = method("maml", steps=1) if name == "maml" else method(name)
    net = conv4(1, 28, statistics="batch" if name == "maml" else "running")
    params = parameters(learner, net, classes=tasks["train"].classes)
    episodes = tasks["train"].sample(2, torch.Generator().manual_seed(0))
    for mode in ("loop", "vectorized"):
        float32, bfloat16 = (
            Engine(learner, net, mode=mode, dtype=dtype)(params, episodes) for dtype in (None, torch.bfloat16)
        )
        assert float(bfloat16.loss) == pytest.approx(float(float32.loss), rel=0.02)
        assert float(bfloat16.loss) != float(float32.loss)
        assert all(value.dtype == torch.float32 for value in bfloat16.gradients.values())
        assert torch.cosine_similarity(flattened(bfloat16.gradients), flattened(float32.gradients), dim=0) > 0.97


def test_training_in_bfloat16_runs_on_a_cpu_and_has_nearly_the_same_first_loss(tasks):
    def first_loss(precision):
        options = {"iterations": 2, "validate_every": 1, "validate_tasks": 2, "batch_size": 2, "progress": False}
        net = conv4(1, 28, filters=8)
        return fit(net, method("maml"), tasks["train"], precision=precision, **options).curve[0].loss

    assert first_loss("bfloat16") == pytest.approx(first_loss("float32"), rel=0.02)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lr": -1.0}, "lr is -1.0, but must be a positive number."),
        ({"lr": float("nan")}, "lr is nan, but must be a positive number."),
        ({"weight_decay": -0.1}, "weight_decay is -0.1, but must be a finite number, 0 or more."),
        ({"patience": -1}, "patience is -1, but must be an integer of at least 0. Use patience=0 or more."),
        (
            {"validate_every": 0},
            "validate_every is 0, but must be an integer of at least 1. Use validate_every=1 or more.",
        ),
        (
            {"validate_tasks": 1},
            "validate_tasks is 1, but must be an integer of at least 2. Use validate_tasks=2 or more.",
        ),
        ({"optimizer": "lion"}, "optimizer is 'lion', but must be one of adam, adamw, radam, sgd, muon."),
        ({"precision": "float16"}, "precision is 'float16', but must be one of float32, bfloat16."),
        ({"seed": None}, "seed is None, but must be a signed 64-bit integer. Use seed=0."),
        ({"minutes": "x"}, "minutes is 'x', but must be a finite number, 0 or more."),
        ({"minutes": math.nan}, "minutes is nan, but must be a finite number, 0 or more."),
        ({"seed": True}, "seed is True, but must be a signed 64-bit integer. Use seed=0."),
        ({"seed": 0.5}, "seed is 0.5, but must be a signed 64-bit integer. Use seed=0."),
        ({"seed": 2**64}, f"seed is {2**64}, but must be a signed 64-bit integer. Use seed=0."),
        (
            {"validate_every": 2.5},
            "validate_every is 2.5, but must be an integer of at least 1. Use validate_every=1 or more.",
        ),
        ({"patience": "long"}, "patience is 'long', but must be an integer of at least 0. Use patience=0 or more."),
        (
            {"device": "gpu"},
            "device is 'gpu', but must be a PyTorch device. Use device='cuda' or device='cpu'.",
        ),
        ({"device": "meta"}, "device is 'meta', but must be a PyTorch device. Use device='cuda' or device='cpu'."),
        ({"device": None}, "device is None, but must be a PyTorch device. Use device='cuda' or device='cpu'."),
    ],
)
def test_invalid_settings_raise_an_error_before_training(options, sentence):
    with pytest.raises(InputError) as caught:
        fit(mlp(1, 1), method("maml"), Sinusoid(), progress=False, **options)
    assert str(caught.value) == sentence


def test_a_run_in_bfloat16_is_loaded_in_float32_on_a_cpu(tmp_path):
    fit(mlp(1, 1), method("maml"), Sinusoid(), iterations=1, precision="bfloat16", out=tmp_path, progress=False)
    assert load(tmp_path).dtype is None


def test_a_nan_validation_score_is_logged_and_does_not_stay_the_best(monkeypatch, caplog):
    scores = iter([math.nan, 1.0, 0.5, math.nan, 0.2])
    monkeypatch.setattr(
        "metabridge.training.trainer.evaluate",
        lambda *_, **__: Score.of(torch.full((2,), next(scores)), "squared error"),
    )
    run = fit(mlp(1, 1), method("nal"), Sinusoid(), validate=Sinusoid(), iterations=5, validate_every=1, progress=False)
    # the first score is the best so far even though it is NaN, and any number is better than NaN
    assert [point.best for point in run.curve] == [True, True, True, False, True]
    assert run.best.mean == pytest.approx(0.2)
    assert "the validation score at iteration 4 is nan" in caplog.text


def test_numpy_numbers_are_accepted_and_stored_as_python_numbers(tmp_path):
    numbers = {"iterations": np.int64(2), "batch_size": np.int32(2), "seed": np.uint8(3), "patience": np.int16(1)}
    numbers |= {"lr": np.float32(0.01), "weight_decay": np.float64(0.5), "validate_every": torch.tensor(1)}
    run = fit(mlp(1, 1), method("maml"), Sinusoid(), **numbers, out=tmp_path, progress=False)
    stored = load(tmp_path).settings["training"]
    assert {name: stored[name] for name in numbers} == {name: value.item() for name, value in numbers.items()}
    python_numbers = {name: value.item() for name, value in numbers.items()}
    again = fit(mlp(1, 1), method("maml"), Sinusoid(), **python_numbers, out=tmp_path, progress=False)
    assert torch.equal(again.params["head.weight"], run.params["head.weight"])


@pytest.mark.parametrize("lr", [np.float32(0.01), torch.tensor(0.01), {"features": np.float32(0.01), "head": 0.5}])
def test_numpy_numbers_in_methods_and_tasks_are_stored_as_python_numbers(tmp_path, lr):
    tasks = SharedRepresentation(dimension=2, variances=(1.0,), noise=np.float32(0.5))
    fit(mlp(2, 1), method("maml", lr=lr), tasks, iterations=1, out=tmp_path, progress=False)
    run = load(tmp_path)
    assert run.method.inner == method("maml", lr=lr).inner
    assert run.settings["tasks"]["noise"] == 0.5


def test_a_missing_gpu_raises_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match=r"device is 'cuda', but PyTorch finds no GPU\. Use device='cpu'\."):
        fit(mlp(1, 1), method("maml"), Sinusoid(), device="cuda", out=tmp_path / "run")
    with pytest.raises(InputError, match="device is 'gpu'"):
        load(tmp_path, device="gpu")


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "radam", "sgd"])
@pytest.mark.parametrize(("name", "options"), [("maml", {"rates": "per-tensor", "steps": 1}), ("r2d2", {})])
def test_weight_decay_applies_to_weights_and_not_to_solver_parameters(optimizer, name, options):
    def params_after_one_step(decay: float) -> dict[str, torch.Tensor]:
        settings = {"iterations": 1, "optimizer": optimizer, "weight_decay": decay, "mode": "loop", "progress": False}
        return fit(mlp(1, 1), method(name, **options), Sinusoid(), **settings).params

    without_decay, with_decay = params_after_one_step(0.0), params_after_one_step(10.0)
    solver_names = [key for key in without_decay if key.startswith(("rates.", "solver."))]
    # last, so that the optimizer's state has the order of earlier versions
    assert solver_names == list(without_decay)[-len(solver_names) :]
    assert all(torch.equal(without_decay[key], with_decay[key]) for key in solver_names)
    assert not torch.equal(without_decay["features.1.weight"], with_decay["features.1.weight"])


def test_training_with_dropout_in_two_threads_gives_the_same_result_as_sequential_training():
    class SlowSinusoid(Sinusoid):
        def sample(self, tasks, generator):
            time.sleep(0.001)  # lets the other thread run, unless that thread is waiting for a lock
            return super().sample(tasks, generator)

    def weights(seed, net):
        run = fit(net, method("maml"), SlowSinusoid(), iterations=20, seed=seed, progress=False)
        return run.params["head.weight"]

    features = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5))
    nets = [Network.around(features, torch.zeros(2, 1), 1) for _ in range(4)]
    expected = [weights(1, nets[0]), weights(2, nets[1])]
    state = torch.get_rng_state()
    with ThreadPoolExecutor(2) as pool:
        weights_in_threads = list(pool.map(weights, [1, 2], nets[2:]))
    assert all(map(torch.equal, weights_in_threads, expected))
    assert torch.equal(torch.get_rng_state(), state)
