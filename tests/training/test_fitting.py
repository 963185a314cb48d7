from __future__ import annotations

import contextlib
import signal

import pytest
from torch import nn

from metabridge import InputError, Sinusoid, method
from metabridge.models import mlp
from metabridge.training import Fitting, Settings, in_turns
from metabridge.training.fitting import alone, unbroken


def begin(seed: int, iterations: int = 3, drop: float = 0.0) -> Fitting:
    net = mlp(1, 1, seed=seed)
    net.features = nn.Sequential(net.features, nn.Dropout(drop))
    return Fitting(net, method("maml"), Sinusoid(), Settings(iterations=iterations, seed=seed), mode="loop")


def test_trainings_end_in_the_order_of_their_lengths_and_others_take_their_turns():
    lengths = {"long": 5, "short": 2, "waiting": 2}
    ends = [
        (name, run.curve[-1].iteration)
        for name, run in in_turns(
            {name: lambda length=length: begin(0, length) for name, length in lengths.items()},
            at_once=2,
            progress=False,
        )
    ]
    assert ends == [("short", 2), ("long", 5), ("waiting", 2)]


def test_when_the_time_is_up_those_under_way_end_and_those_waiting_do_not_begin():
    begun = []

    def noted(seed: int) -> Fitting:
        begun.append(seed)
        return begin(seed)

    runs = dict(in_turns({str(seed): lambda seed=seed: noted(seed) for seed in range(5)}, at_once=2, minutes=0.0))
    assert begun == [0, 1]
    assert [run.finished for run in runs.values()] == [False, False]


def test_what_would_not_be_the_same_beside_others_is_refused():
    with pytest.raises(InputError, match=r"one drops at random, .* Use at_once=1"):
        list(in_turns({"one": lambda: begin(0, drop=0.5), "two": lambda: begin(1)}, at_once=2))
    assert len(list(in_turns({"one": lambda: begin(0, drop=0.5)}, progress=False))) == 1
    with pytest.raises(InputError, match="at_once is 0"):
        list(in_turns({}, at_once=0))


def test_an_interrupt_waits_for_the_step_which_is_then_saved(tmp_path, monkeypatch):
    def interrupted(self: Fitting) -> bool:
        signal.raise_signal(signal.SIGINT)
        return step(self)

    step = Fitting.step
    fitting = Fitting(mlp(1, 1), method("maml"), Sinusoid(), Settings(iterations=3), mode="loop", out=tmp_path)
    monkeypatch.setattr(Fitting, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alone(fitting, "maml", progress=False)
    monkeypatch.undo()
    again = Fitting(mlp(1, 1), method("maml"), Sinusoid(), Settings(iterations=3), mode="loop", out=tmp_path)
    assert again.loop.iteration == 1


def test_a_second_interrupt_does_not_wait():
    reached = []
    with contextlib.suppress(KeyboardInterrupt), unbroken():
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
            reached.append(True)
    assert len(reached) == 1
