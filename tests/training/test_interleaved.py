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
from metabridge.training.fitting import run_to_end, uninterrupted
from small_runs import on_colors, on_sinusoids


@pytest.fixture
def interruptible():
    """Let SIGINT raise KeyboardInterrupt; a shell starts background processes with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def begin(seed: int, iterations: int = 3, drop: float = 0.0) -> Trainer:
    net = mlp(1, 1, seed=seed)
    net.features = nn.Sequential(net.features, nn.Dropout(drop))
    return Trainer(net, method("maml"), Sinusoid(), TrainingConfig(iterations=iterations, seed=seed), mode="loop")


def test_runs_end_in_the_order_of_their_lengths_and_waiting_ones_take_their_place():
    lengths = {"long": 5, "short": 2, "waiting": 2}
    ends = [
        (name, run.curve[-1].iteration)
        for name, run in train_interleaved(
            {name: lambda length=length: begin(0, length) for name, length in lengths.items()},
            at_once=2,
            progress=False,
        )
    ]
    assert ends == [("short", 2), ("long", 5), ("waiting", 2)]


def test_at_the_deadline_active_runs_end_and_waiting_ones_do_not_start():
    begun = []

    def noted(seed: int) -> Trainer:
        begun.append(seed)
        return begin(seed)

    runs = dict(
        train_interleaved({str(seed): lambda seed=seed: noted(seed) for seed in range(5)}, at_once=2, minutes=0.0)
    )
    assert begun == [0, 1]
    assert [run.finished for run in runs.values()] == [False, False]


def test_a_network_that_draws_random_numbers_raises_an_error():
    with pytest.raises(InputError, match=r"the network of one draws random numbers in training .* Use at_once=1"):
        list(train_interleaved({"one": lambda: begin(0, drop=0.5), "two": lambda: begin(1)}, at_once=2))
    assert len(list(train_interleaved({"one": lambda: begin(0, drop=0.5)}, progress=False))) == 1
    with pytest.raises(InputError, match="at_once is 0"):
        list(train_interleaved({}, at_once=0))


def test_an_interrupt_waits_for_the_end_of_the_step_which_is_saved(tmp_path, monkeypatch, interruptible):
    def interrupted(self: Trainer) -> bool:
        signal.raise_signal(signal.SIGINT)
        return step(self)

    step = Trainer.step
    trainer = Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=3), mode="loop", out=tmp_path)
    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_to_end(trainer, "maml", progress=False)
    monkeypatch.undo()
    again = Trainer(mlp(1, 1), method("maml"), Sinusoid(), TrainingConfig(iterations=3), mode="loop", out=tmp_path)
    assert again.iteration == 1


def test_a_second_interrupt_does_not_wait(interruptible):
    reached = []
    with contextlib.suppress(KeyboardInterrupt), uninterrupted():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            reached.append(True)
    assert len(reached) == 1


def test_ignored_interrupts_stay_ignored(interruptible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


TRAINED = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from small_runs import on_sinusoids

def on_sample(count):
    if count == 6:
        print("training", flush=True)
        sys.stdin.read()

on_sinusoids(Path(sys.argv[1]), on_sample)
"""


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_locked_folder_can_be_loaded_but_not_written_by_another_process(tmp_path, end):
    out, expected = tmp_path / "run", on_sinusoids(tmp_path / "once")
    program = TRAINED.format(tests=str(Path(__file__).parent.parent))
    words = [sys.executable, "-c", program, str(out)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "training\n"
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        with pytest.raises(
            InputError, match=rf"{re.escape(str(out))} is in use by process {other.pid} on .* since .* "
        ):
            on_sinusoids(out, lr=0.5)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before
        assert [point.iteration for point in load(out).curve] == [4]
        other.stdin.close() if end == "close" else other.kill()
        assert other.wait() == (0 if end == "close" else -signal.SIGKILL)
    run = on_sinusoids(out)
    assert run.finished
    assert all(torch.equal(value, expected.params[name]) for name, value in run.params.items())
    assert {file.name for file in out.iterdir()} == {file.name for file in (tmp_path / "once").iterdir()}


def test_only_one_of_several_threads_can_train_in_a_folder(tmp_path):
    started, refused = threading.Event(), threading.Event()

    def first(count: int) -> None:
        started.set()
        assert refused.wait(600)

    thread = threading.Thread(target=on_sinusoids, args=(tmp_path, first))
    thread.start()
    assert started.wait(600)
    try:
        with pytest.raises(InputError, match="is in use by process"):
            on_sinusoids(tmp_path)
    finally:
        refused.set()
        thread.join()
    assert on_sinusoids(tmp_path, lambda count: pytest.fail("trained on")).finished


@pytest.mark.skipif(sys.platform == "win32", reason="an open file keeps its folder there")
def test_a_trainer_whose_folder_was_moved_does_not_write_to_the_folder_in_its_place(tmp_path):
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
def test_training_and_caller_do_not_share_random_numbers(tmp_path, name):
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

    once, _ = train(None)
    torch.manual_seed(7)
    with pytest.raises(KeyboardInterrupt):
        on_colors(name, tmp_path / "run", stop, iterations=3)
    resumed, _ = train(tmp_path / "run")
    assert all(torch.equal(value, resumed[key]) for key, value in once.items())


def test_interleaved_runs_do_not_share_random_numbers():
    def one(seed: int) -> Trainer:
        return begin(seed, drop=0.5)

    expected = [run_to_end(one(seed), "", progress=False).params for seed in (0, 1)]
    first, second = one(0), one(1)
    for _ in range(3):
        first.step()
        torch.rand(5)
        second.step()
    for trainer, params in zip((first, second), expected):
        assert all(torch.equal(value, params[name]) for name, value in trainer.run().params.items())
