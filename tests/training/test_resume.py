"""A resumed run has the same result as an uninterrupted one; a run that does not match raises an error."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from metabridge import InputError, fit, method
from metabridge.environments import HardEasy, LinearTasks, Mixture, SharedRepresentation, Sinusoid
from metabridge.learners.adapt import predict
from metabridge.models import DropBlock, Network, mlp, resnet12
from metabridge.schedules import Constant, Cosine, Plateau, Step
from metabridge.training import Augment, Run, Trainer, TrainingConfig, fitting, load
from metabridge.training.checkpoint import RunFolder
from small_runs import SINUSOIDS, CountingEnvironment, colors, on_colors, on_sinusoids


def without_times(points: list[dict]) -> list[dict]:
    return [{key: value for key, value in point.items() if key != "seconds"} for point in points]


def contents(folder: Path) -> dict[str, object]:
    """Return the contents of a run folder without times."""
    content: dict[str, object] = {"settings": json.loads((folder / "settings.json").read_text())}
    content["metrics"] = without_times(
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    )
    for name in ("weights", "state"):
        with safe_open(folder / f"{name}.safetensors", "pt") as file:
            metadata = json.loads(file.metadata()["metabridge"])
            content[name] = {key: file.get_tensor(key).numpy().tobytes() for key in file.keys()}  # noqa: SIM118
        content[f"{name} metadata"] = without_times([metadata])[0] | {"curve": without_times(metadata["curve"])}
    return content


def assert_same_run(run: Run, folder: Path, expected: Run, expected_folder: Path) -> None:
    assert contents(folder) == contents(expected_folder)
    assert all(torch.equal(value, expected.params[name]) for name, value in run.params.items())
    assert all(torch.equal(value, expected.net.state_dict()[name]) for name, value in run.net.state_dict().items())
    assert [replace(point, seconds=0, score=None) for point in run.curve] == [
        replace(point, seconds=0, score=None) for point in expected.curve
    ]
    assert run.finished


class Clock:
    """A replacement for the module `time`, for reaching the time limit `minutes` at a given step."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def train_with_stops(monkeypatch):
    """Return a function that stops training at the given calls of `sample`, resuming it each time, up to the end."""

    def train_stopped(train, stop_by: str, stops: tuple[int, ...]) -> Run:
        for stop in stops:
            clock = Clock()
            monkeypatch.setattr(fitting, "time", clock)

            def on_sample(count, stop=stop, clock=clock):
                if count == stop and stop_by == "interrupt":
                    raise KeyboardInterrupt
                if count == stop:
                    clock.now = 1e6

            if stop_by == "interrupt":
                with pytest.raises(KeyboardInterrupt):
                    train(on_sample)
            else:
                assert not train(on_sample, minutes=1).finished
        return train()

    return train_stopped


SCHEDULES = {"adam": Constant(), "adamw": Cosine(warmup=0.2), "radam": Plateau(patience=0), "sgd": Step()}


@pytest.mark.parametrize("stop_by", ["interrupt", "minutes"])
@pytest.mark.parametrize("optimizer", SCHEDULES)
def test_a_resumed_run_has_the_same_weights_as_an_uninterrupted_one(tmp_path, train_with_stops, optimizer, stop_by):
    options = {"optimizer": optimizer, "schedule": SCHEDULES[optimizer], "weight_decay": 0.01}
    expected = on_sinusoids(tmp_path / "uninterrupted", **options)
    for stops in ((1,), (4,), (5, 2), (7, 3, 1)):
        out = tmp_path / f"stopped {stops}"
        resumed = train_with_stops(
            lambda *on_sample, out=out, **limits: on_sinusoids(out, *on_sample, **options, **limits), stop_by, stops
        )
        assert_same_run(resumed, out, expected, tmp_path / "uninterrupted")


@pytest.mark.parametrize("stop_by", ["interrupt", "minutes"])
@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_interruption_does_not_change_the_result_with_drop_block_and_augmentation(
    tmp_path, train_with_stops, monkeypatch, name, stop_by
):
    monkeypatch.setattr("metabridge.training.trainer.DROP_RATE_STEPS", 3)
    expected = on_colors(name, tmp_path / "uninterrupted")
    resumed = train_with_stops(
        lambda *on_sample, **limits: on_colors(name, tmp_path / "resumed", *on_sample, **limits), stop_by, (2, 4)
    )
    assert_same_run(resumed, tmp_path / "resumed", expected, tmp_path / "uninterrupted")


def test_the_rate_of_drop_block_increases_linearly_and_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr("metabridge.training.trainer.DROP_RATE_STEPS", 4)
    tasks = colors().batches("train", size=8)
    rates: list[float] = []

    def record_rate(block, *_):
        if torch.is_grad_enabled():  # in a training step, not in the estimation of running statistics
            rates.append(float(block.rate))

    for stop in (6, 99):  # first stop at step 6, then train to the end
        net = resnet12(3, 18, 3, widths=(4, 4, 4, 4), drop_rate=0.3)
        next(block for block in net.modules() if isinstance(block, DropBlock)).register_forward_hook(record_rate)
        monkeypatch.setattr(fitting, "time", clock := Clock())
        counted_tasks = CountingEnvironment(
            tasks, lambda count, stop=stop, clock=clock: setattr(clock, "now", 60.0 * (count >= stop))
        )
        fit(
            net,
            method("rfs"),
            counted_tasks,
            batch_size=1,
            iterations=10,
            validate_every=10,
            out=tmp_path,
            minutes=1,
            progress=False,
        )
    assert rates == pytest.approx([0.3 * (iteration // 4 * 4) / 10 for iteration in range(10)])


def test_early_stopping_is_the_same_after_an_interruption(tmp_path, train_with_stops):
    options = {"patience": 1, "lr": 0.5, "iterations": 40, "validate_every": 2}
    expected = on_sinusoids(tmp_path / "uninterrupted", **options)
    assert expected.curve[-1].iteration < 40
    out = tmp_path / "resumed"
    resumed = train_with_stops(
        lambda *on_sample, **limits: on_sinusoids(out, *on_sample, **options, **limits), "minutes", (3, 2)
    )
    assert_same_run(resumed, out, expected, tmp_path / "uninterrupted")
    finished = on_sinusoids(out, lambda count: pytest.fail("training continued"), **options)
    assert_same_run(finished, out, expected, tmp_path / "uninterrupted")


KILLING_SCRIPT = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import small_runs

# `number` counts the calls of `sample` or of `os.replace`; the process is killed in the call with this number

def kill_process():
    os.kill(os.getpid(), signal.SIGKILL)

def killed_at_sample(out, number):
    small_runs.on_sinusoids(out, lambda count: kill_process() if count == number else None)

def killed_at_write(out, number):
    replace, calls = os.replace, []
    def replace_or_kill(*paths):
        calls.append(paths)
        if len(calls) == number:
            kill_process()
        replace(*paths)
    os.replace = replace_or_kill
    small_runs.on_sinusoids(out)

def killed_while_extended(out, number):
    run_in_fork(lambda: small_runs.on_sinusoids(out, iterations=8))
    killed_at_write(out, number)

def run_in_fork(function, *arguments):
    child = os.fork()
    if child == 0:
        function(*arguments)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])  # the signal that killed the process

root = Path({root!r})
small_runs.on_sinusoids(root / "uninterrupted")
kills = ((killed_at_sample, (1, 6, 13)), (killed_at_write, range(1, 13)), (killed_while_extended, (1, 2, 3, 4)))
for train_and_kill, numbers in kills:
    for number in numbers:
        out = root / f"{{train_and_kill.__name__}} {{number}}"
        print(run_in_fork(train_and_kill, out, number))
        run_in_fork(small_runs.on_sinusoids, out)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
def test_killing_a_run_at_any_write_or_step_does_not_change_its_result(tmp_path):
    script = KILLING_SCRIPT.format(tests=str(Path(__file__).parent.parent), root=str(tmp_path))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    num_kills = 3 + 12 + 4  # the lengths of the three `numbers` in the script
    assert result.stdout.split() == ["9"] * num_kills  # every process was killed by signal 9
    expected = contents(tmp_path / "uninterrupted")
    folders = [folder for folder in tmp_path.iterdir() if folder.name != "uninterrupted"]
    assert len(folders) == num_kills
    names = {file.name for file in (tmp_path / "uninterrupted").iterdir()}
    for folder in folders:
        assert contents(folder) == expected, folder.name
        assert {file.name for file in folder.iterdir()} == names  # no lock file and no temporary file is left


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("first_failing_call", [1, 2, 3])
def test_a_failed_write_keeps_the_old_file_and_the_run_can_be_resumed(
    tmp_path, monkeypatch, function, first_failing_call
):
    on_sinusoids(tmp_path / "uninterrupted")
    out, calls = tmp_path / "run", []
    monkeypatch.setattr(fitting, "time", clock := Clock())
    on_sinusoids(out, lambda count: setattr(clock, "now", 1e6) if count == 5 else None, minutes=1)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    original = getattr(os, function)

    def fail_on_full_disk(*arguments):
        if function == "fsync" and not stat.S_ISREG(os.fstat(arguments[0]).st_mode):
            return original(*arguments)  # the argument is a folder
        calls.append(arguments)
        if len(calls) >= first_failing_call:
            raise OSError(28, "No space left on device")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail_on_full_disk)
        with pytest.raises(InputError, match=r"cannot be written \(No space left on device\)"):
            on_sinusoids(out)
    after = {file.name: file.read_bytes() for file in out.iterdir()}
    assert after.keys() == before.keys()
    assert sum(after[name] != before[name] for name in before) == first_failing_call - 1
    on_sinusoids(out)
    assert contents(out) == contents(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"lr": 0.5}, "training.lr was 0.001 and is now 0.5"),
        ({"batch_size": 3}, "training.batch_size was 2 and is now 3"),
        ({"optimizer": "sgd"}, "training.optimizer was adam and is now sgd"),
        ({"weight_decay": 0.1}, "training.weight_decay was 0.0 and is now 0.1"),
        ({"schedule": Cosine()}, "training.schedule.name was constant and is now cosine"),
        ({"augment": Augment()}, "training.augment was None and is now {'padding': 8"),
        ({"validate_every": 5}, "training.validate_every was 4 and is now 5"),
        ({"validate_tasks": 7}, "training.validate_tasks was 6 and is now 7"),
        ({"precision": "bfloat16"}, "training.precision was float32 and is now bfloat16"),
        ({"seed": 1}, "training.seed was 0 and is now 1"),
        ({"net": mlp(1, 1, width=9)}, "model.width was 8 and is now 9"),
        ({"net": Network(nn.Linear(1, 4), nn.Linear(4, 1))}, "model was {'model': 'mlp'"),
        ({"method": method("anil", steps=1, lr=0.02)}, "method.adapts was all and is now head"),
        ({"method": method("maml", steps=2, lr=0.02)}, "method.inner.steps was 1 and is now 2"),
        ({"environment": Sinusoid(shots=11)}, "tasks.shots was 10 and is now 11"),
        ({"validate": None}, "validation was {'environment': 'Sinusoid'"),
    ],
)
def test_a_setting_that_differs_from_the_run_raises_an_error_with_its_name(tmp_path, change, difference):
    options = {"net": mlp(1, 1, width=8), "method": method("maml", steps=1, lr=0.02), "environment": Sinusoid()}
    options |= {"validate": Sinusoid(), "out": tmp_path} | SINUSOIDS
    fit(**options, minutes=0)
    with pytest.raises(InputError) as caught:
        fit(**options | change)
    assert f"contains a run with other settings ({difference}" in str(caught.value)


@pytest.mark.parametrize(
    ("environment", "other_environment", "setting"),
    [
        (
            LinearTasks(HardEasy(0.1, 1.0, R=1.0).landscape),
            LinearTasks(HardEasy(0.1, 1.0, R=2.0).landscape),
            r"tasks\.landscape\.groups",
        ),
        (SharedRepresentation(10), SharedRepresentation(10, variances=(1.0, 2.0)), r"tasks\.variances"),
        (Mixture((Sinusoid(),), (1.0,)), Mixture((Sinusoid(queries=3),), (1.0,)), r"tasks\.environments"),
    ],
)
def test_a_run_cannot_continue_with_an_environment_of_the_same_class_but_other_settings(
    tmp_path, environment, other_environment, setting
):
    def train(tasks):
        dimension = tasks.sample(1, torch.Generator()).support_x.shape[-1]
        return fit(mlp(dimension, 1, width=4), method("maml"), tasks, iterations=1, out=tmp_path, progress=False)

    train(environment)
    assert train(environment).finished
    with pytest.raises(InputError, match=rf"contains a run with other settings \({setting}"):
        train(other_environment)


def test_continuing_a_run_reads_its_settings_once(tmp_path, monkeypatch):
    on_sinusoids(tmp_path, minutes=0)
    read, folders = RunFolder.settings, []
    monkeypatch.setattr(RunFolder, "settings", lambda folder: folders.append(folder) or read(folder))
    assert on_sinusoids(tmp_path).finished
    assert folders == [RunFolder(tmp_path)]


def test_a_run_cannot_continue_with_rotated_classes(tmp_path):
    data = colors()
    options = {"out": tmp_path, "iterations": 1, "progress": False}
    for images in (data, data.with_rotations(("train",))):
        net, tasks = mlp(3 * 18 * 18, 3), images.tasks("train", ways=3, shots=1, queries=1)
        if images is data:
            fit(net, method("anil"), tasks, **options)
    with pytest.raises(InputError, match=r"tasks\.classes was 4 and is now 16"):
        fit(net, method("anil"), tasks, **options)


def test_a_run_from_a_gpu_cannot_be_continued_on_a_cpu(tmp_path):
    on_sinusoids(tmp_path, minutes=0)
    tensors, metadata = RunFolder(tmp_path).read("state")
    RunFolder(tmp_path).write("state", tensors | {"random.cuda": torch.zeros(16, dtype=torch.uint8)}, metadata)
    with pytest.raises(InputError, match=r"was started on a GPU. Continue it there, or use another folder\."):
        on_sinusoids(tmp_path)


class ChangingBuffers(nn.Module):
    """A layer whose outputs depend on buffers that training changes, one in place and one by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x) - self.mean / (1 + self.count))
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


def with_changing_buffers(out: Path, on_sample=lambda count: None, **options) -> Run:
    torch.manual_seed(0)
    net = Network(ChangingBuffers(), nn.Linear(4, 1))
    return fit(
        net,
        method("anil"),
        CountingEnvironment(Sinusoid(), on_sample),
        validate=Sinusoid(),
        out=out,
        **SINUSOIDS | options,
    )


@pytest.mark.parametrize("stop_by", ["interrupt", "minutes"])
def test_buffers_that_change_in_training_are_restored(tmp_path, train_with_stops, stop_by):
    expected = with_changing_buffers(tmp_path / "uninterrupted")
    assert expected.net.features.count > 0
    resumed = train_with_stops(
        lambda *on_sample, **limits: with_changing_buffers(tmp_path / "resumed", *on_sample, **limits), stop_by, (7, 3)
    )
    assert_same_run(resumed, tmp_path / "resumed", expected, tmp_path / "uninterrupted")
    assert all(torch.equal(*pair) for pair in zip(resumed.net.buffers(), expected.net.buffers(), strict=True))


def test_a_run_of_version_0_1_0_whose_state_has_no_buffers_continues(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(fitting, "time", clock)
    assert not with_changing_buffers(tmp_path, lambda count: setattr(clock, "now", 60.0 * count), minutes=5).finished
    tensors, metadata = RunFolder(tmp_path).read("state")
    without_buffers = {name: value for name, value in tensors.items() if not name.startswith("buffers.")}
    assert len(without_buffers) < len(tensors)
    RunFolder(tmp_path).write("state", without_buffers, metadata)
    assert with_changing_buffers(tmp_path).finished


def with_a_frozen_layer(out: Path, frozen: str, **options) -> Run:
    net = mlp(1, 1, width=8)
    net.get_submodule(frozen).requires_grad_(False)
    return fit(net, method("maml"), Sinusoid(), out=out, iterations=2, batch_size=2, progress=False, **options)


def test_frozen_parameters_are_saved_and_must_be_the_same_to_continue(tmp_path):
    run = with_a_frozen_layer(tmp_path, "features.1")
    assert with_a_frozen_layer(tmp_path, "features.1").finished
    with pytest.raises(
        InputError, match=r"contains a run with other settings \(frozen\[0\] was features.1.bias and is now"
    ):
        with_a_frozen_layer(tmp_path, "features.3")
    loaded = load(tmp_path)
    assert [name for name, value in loaded.net.named_parameters() if not value.requires_grad] == [
        "features.1.weight",
        "features.1.bias",
    ]
    tasks = Sinusoid().sample(2, torch.Generator().manual_seed(0))
    outputs = [predict(model.method, model.net, model.params, tasks) for model in (run, loaded)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("optimizer", SCHEDULES)
def test_iterations_can_be_increased_but_cannot_be_fewer_than_those_already_done(tmp_path, optimizer):
    options = {"optimizer": optimizer, "schedule": SCHEDULES[optimizer], "validate_every": None}
    on_sinusoids(tmp_path / "run", iterations=30, **options)
    sample_calls: list[int] = []
    run = on_sinusoids(tmp_path / "run", sample_calls.append, iterations=32, **options)
    assert len(sample_calls) == 2
    assert [point.iteration for point in run.curve] == [*range(3, 31, 3), 32]  # the validation interval stays the same
    assert run.settings["training"]["iterations"] == 32
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["training"]["iterations"] == 32
    with pytest.raises(InputError, match=r"has done 32 iterations, but iterations is 31\. Use iterations=32 or more"):
        on_sinusoids(tmp_path / "run", iterations=31, **options)
    with pytest.raises(InputError, match=r"training\.batch_size was 2 and is now 3"):
        on_sinusoids(tmp_path / "run", iterations=40, batch_size=3, **options)
    assert on_sinusoids(tmp_path / "run", iterations=32, **options).finished


def test_an_extended_run_equals_a_run_of_that_length(tmp_path):
    """The learning rate must be constant, since schedules are stretched to the new length."""
    expected = on_sinusoids(None, iterations=13)
    on_sinusoids(tmp_path, iterations=8)
    with pytest.raises(KeyboardInterrupt):
        on_sinusoids(tmp_path, lambda count: _interrupt() if count == 2 else None, iterations=13)
    assert not load(tmp_path).finished
    resumed = on_sinusoids(tmp_path, iterations=13)
    assert [point.score.mean for point in resumed.curve] == [point.score.mean for point in expected.curve]
    assert all(torch.equal(value, expected.params[name]) for name, value in resumed.params.items())


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_run_without_checksums_continues(tmp_path):
    from safetensors.torch import save

    expected = on_sinusoids(tmp_path / "uninterrupted")
    with pytest.raises(KeyboardInterrupt):
        on_sinusoids(tmp_path / "run", lambda count: _interrupt() if count == 6 else None)
    for name in ("weights", "state"):
        tensors, metadata = RunFolder(tmp_path / "run").read(name)
        del metadata["settings"]
        content = save(tensors, {"metabridge": json.dumps(metadata)})  # without a checksum, as in version 0.1.0
        (tmp_path / "run" / f"{name}.safetensors").write_bytes(content)
    assert load(tmp_path / "run").curve[-1].iteration == 4
    assert_same_run(on_sinusoids(tmp_path / "run"), tmp_path / "run", expected, tmp_path / "uninterrupted")


def test_a_run_shortened_to_its_current_iteration_ends_with_a_point_there(tmp_path):
    config = TrainingConfig(iterations=20, validate_every=4, validate_tasks=6, batch_size=2)
    net, learner, tasks = mlp(1, 1, width=8), method("maml", steps=1, lr=0.02), CountingEnvironment(Sinusoid())
    trainer = Trainer(net, learner, tasks, config, validate=Sinusoid(), mode="loop", out=tmp_path)
    for _ in range(6):
        trainer.step()
    trainer.save()
    trainer.close()
    run = on_sinusoids(tmp_path, lambda count: pytest.fail("training continued"), iterations=6, validate_every=4)
    assert run.finished
    assert [point.iteration for point in run.curve] == [4, 6]
    assert load(tmp_path).finished
