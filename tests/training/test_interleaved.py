from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from metabridge import InputError, method
from metabridge.environments import Sinusoid
from metabridge.models import mlp
from metabridge.training import Trainer, TrainingConfig, load, train_interleaved
from metabridge.training.fitting import delay_interrupt, run_to_end
from small_runs import on_colors, on_sinusoids


@pytest.fixture
def interruptible():
    """Let SIGINT raise KeyboardInterrupt; a shell starts background processes with SIGINT ignored."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


def new_trainer(seed: int, iterations: int = 3, dropout: float = 0.0) -> Trainer:
    net = mlp(1, 1, seed=seed)
    net.features = nn.Sequential(net.features, nn.Dropout(dropout))
    return Trainer(net, method("maml"), Sinusoid(), TrainingConfig(iterations=iterations, seed=seed), mode="loop")


def test_when_a_run_ends_the_next_waiting_run_starts():
    lengths = {"long": 5, "short": 2, "waiting": 2}
    ended_runs = [
        (name, run.curve[-1].iteration)
        for name, run in train_interleaved(
            {name: lambda length=length: new_trainer(0, length) for name, length in lengths.items()},
            at_once=2,
            progress=False,
        )
    ]
    assert ended_runs == [("short", 2), ("long", 5), ("waiting", 2)]


def test_at_the_deadline_active_runs_end_and_waiting_runs_do_not_start():
    started_seeds = []

    def create_trainer(seed: int) -> Trainer:
        started_seeds.append(seed)
        return new_trainer(seed)

    trainers = {str(seed): lambda seed=seed: create_trainer(seed) for seed in range(5)}
    runs = dict(train_interleaved(trainers, at_once=2, minutes=0.0))
    assert started_seeds == [0, 1]
    assert [run.finished for run in runs.values()] == [False, False]


def test_a_network_that_draws_random_numbers_raises_an_error():
    with pytest.raises(InputError, match=r"the network of one draws random numbers in training .* Use at_once=1"):
        list(train_interleaved({"one": lambda: new_trainer(0, dropout=0.5), "two": lambda: new_trainer(1)}, at_once=2))
    assert len(list(train_interleaved({"one": lambda: new_trainer(0, dropout=0.5)}, progress=False))) == 1
    with pytest.raises(InputError, match="at_once is 0"):
        list(train_interleaved({}, at_once=0))


def test_an_interrupt_is_delayed_to_the_end_of_the_step_which_is_saved(tmp_path, monkeypatch, interruptible):
    def interrupted_step(self: Trainer) -> bool:
        signal.raise_signal(signal.SIGINT)
        return step(self)

    step = Trainer.step
    trainer = Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=3), mode="loop", out=tmp_path)
    monkeypatch.setattr(Trainer, "step", interrupted_step)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(trainer, "maml", progress=False)
    monkeypatch.undo()
    resumed = Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=3), mode="loop", out=tmp_path)
    assert resumed.iteration == 1


def test_a_second_interrupt_is_not_delayed(interruptible):
    delayed = []
    with contextlib.suppress(KeyboardInterrupt), delay_interrupt():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            delayed.append(True)
    assert len(delayed) == 1


def test_ignored_interrupts_stay_ignored(interruptible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with delay_interrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


TRAINING_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from small_runs import on_sinusoids

def on_sample(count):  # is called before training tasks are sampled, with the number of the call
    if count == 6:
        print("training", flush=True)
        sys.stdin.read()  # waits until the test closes stdin or kills this process

on_sinusoids(Path(sys.argv[1]), on_sample)
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_locked_folder_can_be_loaded_but_not_written_by_another_process(tmp_path, end):
    out, expected = tmp_path / "run", on_sinusoids(tmp_path / "expected")
    script = TRAINING_SCRIPT.format(tests=str(Path(__file__).parent.parent))
    command = [sys.executable, "-c", script, str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "training\n"
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        with pytest.raises(
            InputError, match=rf"{re.escape(str(out))} is in use by process {process.pid} on .* since .* "
        ):
            on_sinusoids(out, lr=0.5)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
        assert [point.iteration for point in load(out).curve] == [4]
        process.stdin.close() if end == "close" else process.kill()
        assert process.wait() == (0 if end == "close" else -signal.SIGKILL)
    run = on_sinusoids(out)
    assert run.finished
    assert all(torch.equal(value, expected.params[name]) for name, value in run.params.items())
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "expected").iterdir()}


def test_only_one_of_several_threads_can_train_in_a_folder(tmp_path):
    training_started, second_was_rejected = threading.Event(), threading.Event()

    def wait_in_step(count: int) -> None:
        training_started.set()
        assert second_was_rejected.wait(600)

    thread = threading.Thread(target=on_sinusoids, args=(tmp_path, wait_in_step))
    thread.start()
    assert training_started.wait(600)
    try:
        with pytest.raises(InputError, match="is in use by process"):
            on_sinusoids(tmp_path)
    finally:
        second_was_rejected.set()
        thread.join()
    assert on_sinusoids(tmp_path, lambda count: pytest.fail("training continued")).finished


@pytest.mark.skipif(sys.platform == "win32", reason="on Windows, a folder with an open file cannot be moved")
def test_a_trainer_whose_folder_was_moved_does_not_write_to_a_new_folder_of_the_same_name(tmp_path):
    def trainer(lr: float) -> Trainer:
        return Trainer(
            mlp(1, 1),
            method("maml"),
            Sinusoid(),
            TrainingConfig(iterations=2, lr=lr),
            mode="loop",
            out=tmp_path / "run",
        )

    first = trainer(0.1)
    (tmp_path / "run").rename(tmp_path / "moved")
    second = trainer(0.2)
    second.step()
    second.save()
    before = (tmp_path / "run" / "state.safetensors").read_bytes()
    with pytest.raises(InputError, match="is not the one that was locked"):
        first.step()
    first.close()
    assert (tmp_path / "run" / "state.safetensors").read_bytes() == before
    second.close()


def test_a_trainer_that_failed_to_start_or_was_closed_unlocks_its_folder(tmp_path):
    def trainer(**options) -> Trainer:
        return Trainer(
            mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=2, **options), mode="loop", out=tmp_path
        )

    first = trainer()
    first.step()
    with pytest.raises(InputError, match="is in use by"):
        trainer()
    first.close()
    with pytest.raises(InputError, match="contains a run with other settings"):
        trainer(lr=0.5)
    second = trainer()
    with pytest.raises(InputError, match=r"was closed. Create a new Trainer"):
        first.save()
    assert run_to_end(second, "maml", progress=False).finished


@pytest.mark.parametrize("name", ["mtl", "rfs"])
def test_training_and_its_caller_do_not_share_random_numbers(tmp_path, name):
    def train(out: Path | None, on_sample=lambda count: None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        torch.manual_seed(7)
        expected = torch.rand(3)
        torch.manual_seed(7)
        params = on_colors(name, out, on_sample, iterations=3).params
        assert torch.equal(torch.rand(3), expected)
        return params, expected

    def stop(count: int) -> None:
        if count == 2:
            raise KeyboardInterrupt

    uninterrupted, _ = train(None)
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt):
        on_colors(name, tmp_path / "run", stop, iterations=3)
    resumed, _ = train(tmp_path / "run")
    assert all(torch.equal(value, resumed[key]) for key, value in uninterrupted.items())


def test_interleaved_runs_do_not_share_random_numbers():
    def trainer(seed: int) -> Trainer:
        return new_trainer(seed, dropout=0.5)

    expected = [run_to_end(trainer(seed), "", progress=False).params for seed in (0, 1)]
    first, second = trainer(0), trainer(1)
    for _ in range(3):
        first.step()
        torch.rand(5)
        second.step()
    for run, params in zip((first.run(), second.run()), expected):
        assert all(torch.equal(value, params[name]) for name, value in run.params.items())
