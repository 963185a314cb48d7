from __future__ import annotations

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from metabridge import InputError
from metabridge.training.trackers import TrackedRun, check_tracker, read_tracked_runs
from small_runs import on_sinusoids

SERVICES = ("wandb", "trackio")


class Service:
    """A stand-in for wandb and trackio that records all calls."""

    def __init__(self) -> None:
        self.runs: list[dict] = []
        self.logged: list[tuple[int, dict]] = []
        self.finished = 0
        self.error: Exception | None = None  # raised by the next call of `log`

    def init(self, **arguments):
        self.runs.append(arguments)
        return SimpleNamespace(log=self.log, finish=self.finish)

    def log(self, values, step):
        if self.error is not None:
            raise self.error
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.logged]


class ListTracker:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def log(self, values, step):
        self.steps.append(step)

    def finish(self):
        pass


@pytest.fixture(params=SERVICES)
def service(request, monkeypatch):
    monkeypatch.delenv(f"{request.param.upper()}_PROJECT", raising=False)
    service = Service()
    service.name = request.param
    monkeypatch.setitem(sys.modules, request.param, service)
    return service


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def expected_values(curve):
    """Return what a tracker must receive for each point of the learning curve of a run with a constant rate."""
    values, best = [], None
    for point in curve:
        best = point.score.mean if point.best else best
        validation = {"validation_score": point.score.mean, "validation_ci95": point.score.ci95, "best_score": best}
        values.append(
            (point.iteration, {"loss": point.loss, "learning_rate": 1e-3, "seconds": point.seconds} | validation)
        )
    return values


def interrupt_at(count):
    def on_sample(number):
        if number == count:
            raise KeyboardInterrupt

    return on_sample


def same_weights(run, other):
    return all(torch.equal(value, other.params[name]) for name, value in run.params.items())


@pytest.mark.parametrize("log", ["tensorboard", "service"])
def test_a_tracker_receives_the_learning_curve_and_does_not_change_the_run(tmp_path, monkeypatch, log):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    run = on_sinusoids(tmp_path / "run", log="wandb" if log == "service" else log)
    assert same_weights(run, on_sinusoids(tmp_path / "untracked"))
    expected = expected_values(run.curve)
    assert [step for step, _ in expected] == [4, 8, 12, 13]
    if log == "service":
        assert service.logged == expected
        return
    events = read_events(tmp_path / "run" / "tensorboard")
    for name in expected[0][1]:
        scalars = [(event.step, event.value) for event in events.Scalars(name)]
        assert scalars == [(step, pytest.approx(values[name])) for step, values in expected]
    (text,) = events.Tensors("settings/text_summary")
    assert '"solver": "GradientDescent"' in text.tensor_proto.string_val[0].decode()


def test_the_run_has_its_settings_a_project_and_a_unique_name(service, tmp_path, monkeypatch):
    on_sinusoids(tmp_path / "my run", log=service.name)
    monkeypatch.setenv(f"{service.name.upper()}_PROJECT", "my-project")
    on_sinusoids(None, log=service.name, name="maml")
    saved, unsaved = service.runs
    assert saved["config"] == json.loads(json.dumps(saved["config"]))
    assert saved["config"]["method"]["inner"]["steps"] == 1
    assert unsaved["config"]["training"]["batch_size"] == 2
    assert (saved["project"], unsaved["project"]) == ("metabridge", "my-project")
    assert saved["name"].startswith("my-run-")
    assert unsaved["name"].startswith("maml-")
    assert saved["resume"] == "allow"
    assert saved.get("id") == (saved["name"] if service.name == "wandb" else None)  # trackio has no such argument
    assert service.finished == 2


def test_a_resumed_run_continues_its_run_in_the_tracker_without_duplicates(service, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        on_sinusoids(tmp_path, interrupt_at(10), log=service.name)
    assert (service.steps, service.finished) == ([4, 8], 1)
    run = on_sinusoids(tmp_path, log=service.name)
    assert service.logged == expected_values(run.curve)
    assert service.runs[0]["name"] == service.runs[1]["name"]
    on_sinusoids(tmp_path, log=service.name)  # there is nothing left to do
    assert len(service.runs) == 2
    on_sinusoids(tmp_path, log=service.name, iterations=20)
    assert service.steps == [4, 8, 12, 13, 16, 20]


def test_resumed_tensorboard_files_have_no_duplicates(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        on_sinusoids(tmp_path, interrupt_at(10), log="tensorboard")
    state = json.loads((tmp_path / "tracker.json").read_bytes())
    assert state["tensorboard"]["iteration"] == 8
    state["tensorboard"]["iteration"] = 4  # as if the process was killed after the point was sent, before it was stored
    (tmp_path / "tracker.json").write_text(json.dumps(state))
    on_sinusoids(tmp_path, log="tensorboard")
    events = read_events(tmp_path / "tensorboard")
    assert [event.step for event in events.Scalars("loss")] == [4, 8, 12, 13]
    assert len(events.Tensors("settings/text_summary")) == 1


def test_a_tracker_that_is_added_later_receives_the_whole_curve(service, tmp_path):
    tracker = ListTracker()
    with pytest.raises(KeyboardInterrupt):
        on_sinusoids(tmp_path, interrupt_at(10), log=tracker)
    on_sinusoids(tmp_path, log=service.name)
    assert (tracker.steps, service.steps) == ([4, 8], [4, 8, 12, 13])
    assert read_tracked_runs(tmp_path).keys() == {"ListTracker", service.name}
    on_sinusoids(tmp_path, log=tracker)
    assert tracker.steps == [4, 8, 12, 13]


def test_training_that_starts_again_starts_a_new_run_in_the_tracker(service, tmp_path):
    on_sinusoids(tmp_path, log=service.name)
    for name in ("settings.json", "weights.safetensors", "state.safetensors", "metrics.jsonl"):
        (tmp_path / name).unlink()
    on_sinusoids(tmp_path, log=service.name)
    assert service.runs[0]["name"] != service.runs[1]["name"]
    assert service.steps == [4, 8, 12, 13] * 2


@pytest.mark.parametrize("moment", ["init", "log", "finish"])
def test_a_failing_tracker_gives_one_warning_and_training_goes_on(service, tmp_path, caplog, moment):
    def fail(*_, **__):
        raise ConnectionError("network is down")

    setattr(service, moment, fail)
    with caplog.at_level(logging.WARNING, "metabridge"):
        run = on_sinusoids(tmp_path / "run", log=service.name)
    assert [record.getMessage() for record in caplog.records] == [
        f"{service.name} failed (ConnectionError: network is down). Training continues without it."
    ]
    assert run.finished
    assert same_weights(run, on_sinusoids(tmp_path / "untracked"))


def test_points_that_a_failing_tracker_missed_are_sent_when_the_run_is_continued(service, tmp_path):
    service.error = OSError("disk is full")
    on_sinusoids(tmp_path, log=service.name)
    assert service.steps == []
    service.error = None
    on_sinusoids(tmp_path, log=service.name)
    assert service.steps == [4, 8, 12, 13]


def test_the_learning_rate_is_that_of_the_step_before_the_point(tmp_path, service):
    on_sinusoids(tmp_path, log=service.name, schedule="cosine", lr=0.5)
    from metabridge.schedules import Cosine

    rates = {step: values["learning_rate"] for step, values in service.logged}
    assert rates == {step: 0.5 * Cosine().factor((step - 1) / 13, []) for step in (4, 8, 12, 13)}


def test_without_an_output_folder_tensorboard_files_are_in_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_sinusoids(None, log="tensorboard")
    (folder,) = (tmp_path / "runs" / "tensorboard").iterdir()
    assert [event.step for event in read_events(folder).Scalars("loss")] == [4, 8, 12, 13]


def test_without_a_tracker_no_tracker_is_imported(tmp_path, monkeypatch):
    for name in (*SERVICES, "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    on_sinusoids(tmp_path)
    assert not (tmp_path / "tracker.json").exists()


@pytest.mark.parametrize(
    ("log", "package"), [("tensorboard", "'metabridge[tensorboard]'"), ("wandb", "wandb"), ("trackio", "trackio")]
)
def test_a_missing_package_is_named_before_training(tmp_path, monkeypatch, log, package):
    for name in (*SERVICES, "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=f"log is '{log}', but {log} cannot be imported .* pip install ") as caught:
        on_sinusoids(tmp_path / "run", lambda count: pytest.fail("training started"), log=log)
    assert f"pip install {package}, or" in str(caught.value)


@pytest.mark.parametrize("value", ["mlflow", 3, object()])
def test_other_values_are_refused(value):
    with pytest.raises(InputError, match="must be tensorboard, wandb or trackio"):
        check_tracker("log", value)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "null",
        '{"wandb": 3}',
        '{"wandb": {}}',
        '{"wandb": {"run_id": 3}}',
        '{"wandb": {"run_id": "../x", "iteration": 4}}',
        '{"wandb": {"run_id": "x", "iteration": -4}}',
        '{"wandb": {"run_id": "x", "iteration": "4"}}',
        '{"wandb": {"run_id": "x", "iteration": 4, "key": 1}}',
    ],
)
def test_a_damaged_state_is_refused(tmp_path, content):
    (tmp_path / "tracker.json").write_text(content)
    with pytest.raises(InputError, match=r"tracker\.json is damaged"):
        read_tracked_runs(tmp_path)


def test_a_damaged_state_is_refused_only_if_the_run_is_tracked(tmp_path, service):
    on_sinusoids(tmp_path, log=service.name)
    (tmp_path / "tracker.json").write_text("{")
    with pytest.raises(InputError, match=r"tracker\.json is damaged"):
        on_sinusoids(tmp_path, log=service.name, iterations=20)
    assert on_sinusoids(tmp_path, iterations=20).finished


def test_the_state_can_be_read_back(tmp_path, service):
    on_sinusoids(tmp_path, log=service.name)
    assert read_tracked_runs(tmp_path) == {service.name: TrackedRun(service.runs[0]["name"], 13)}
