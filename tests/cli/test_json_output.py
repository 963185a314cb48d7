"""`--json -` prints only JSON to standard output, with the numbers of the library."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metabridge import __version__
from metabridge.cli.json_output import to_json
from metabridge.experiments.experiment import Experiment, Outcome
from metabridge.experiments.glyph_methods import Comparison
from metabridge.learners import PRESETS
from metabridge.nas import Architecture, ProxyScore, RepeatedScore, TimeLimitError
from metabridge.report.results import Machine, Result, Row
from metabridge.training import Score, load
from pictures import write_tree
from small_runs import TRAIN

VERSIONS = {"metabridge": __version__, "torch": torch.__version__}


def reject(name: str) -> None:
    pytest.fail(f"the JSON contains {name}")


def parse(text: str | bytes):
    """Parse strict JSON, which has neither NaN nor infinity."""
    return json.loads(text, parse_constant=reject)


def test_non_finite_numbers_are_null_and_others_are_not_rounded():
    values = {"a": [float("nan"), float("inf"), 1 / 3], "b": {1: -float("inf")}, "c": Path("x"), "d": (True, None, 2)}
    assert to_json(values) == {"a": [None, None, 1 / 3], "b": {"1": None}, "c": "x", "d": [True, None, 2]}


def test_train_reports_the_run_even_if_its_tracker_prints_messages(metabridge, tmp_path, monkeypatch):
    steps = []
    tracker = SimpleNamespace(log=lambda values, step: steps.append(step), finish=lambda: print("uploaded"))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **_: print("a project") or tracker))
    out = tmp_path / "run"
    status, printed, errors = metabridge(*TRAIN, "--method", "mtl", "--out", out, "--json", "-", "--log", "trackio")
    assert (status, steps) == (0, [2, 4])
    assert "a project\n" in errors
    report, run = parse(printed), load(out)
    assert report["curve"] == [parse(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert report["best"]["validation"]["mean"] == run.best.mean
    assert report["best"]["validation"]["ci95"] == run.best.ci95
    assert {key: report[key] for key in ("run", "method", "finished", "iterations", "seconds", "versions")} == {
        "run": str(out),
        "method": "mtl",
        "finished": True,
        "iterations": 4,
        "seconds": run.seconds,
        "versions": VERSIONS,
    }
    assert f"The run is in {out}. Next: metabridge evaluate" in errors


def test_an_unknown_tracker_is_refused_before_the_images_are_read(metabridge, monkeypatch, tmp_path):
    monkeypatch.setattr("metabridge.datasets.load", lambda *_, **__: pytest.fail("images were read"))
    _, _, errors = metabridge("train", "--out", tmp_path, "--log", "mlflow")
    assert errors == "metabridge train: --log is 'mlflow', but must be tensorboard, wandb or trackio.\n"


def test_an_unfinished_training_run_has_no_best_score(metabridge, tmp_path):
    status, printed, errors = metabridge(*TRAIN, "--out", tmp_path, "--minutes", 0, "--json", "-")
    report = parse(printed)
    assert (status, report["finished"], report["best"], report["iterations"]) == (0, False, None, 0)
    assert "Stopped after 0 minutes." in errors


def test_json_is_written_to_a_file_next_to_the_usual_text(metabridge, tmp_path):
    file = tmp_path / "new" / "methods.json"
    status, printed, _ = metabridge("methods", "--json", file)
    assert status == 0
    assert "gradient descent: steps 5, lr 0.01" in printed
    assert printed.endswith(f"All results are in {file}\n")
    assert [method["name"] for method in parse(file.read_bytes())] == list(PRESETS)


def test_methods_reports_every_option(metabridge):
    status, printed, errors = metabridge("methods", "--json", "-")
    methods = {method["name"]: method for method in parse(printed)}
    assert (status, errors) == (0, "")
    for name, method in PRESETS.items():
        solvers = (methods[name]["inner"], methods[name]["test_solver"])
        assert solvers == tuple(
            None if solver is None else solver.to_dict() for solver in (method.inner, method.test_solver)
        )
        keys = ("adapts", "outer", "training_head", "split", "trains")
        assert all(methods[name][key] == getattr(method, key) for key in keys)
    assert methods["maml"]["inner"] == {"solver": "GradientDescent", "steps": 5, "lr": 0.01, "rates": "fixed"}


def test_data_check_reports_counts_and_problems(metabridge, tmp_path):
    root = write_tree(tmp_path / "data", {"train/cat": 4, "train/dog": 5, "test/elm": 4, "test/oak": 4})
    (root / "train" / "cat" / "bad.png").write_bytes(b"no image")
    (root / "test" / "oak" / "copy.png").write_bytes((root / "train" / "dog" / "0.png").read_bytes())
    command = ("data", "check", root, "--ways", 2, "--shots", 1, "--queries", 3, "--json", "-")
    status, printed, errors = metabridge(*command)
    report = parse(printed)
    assert (status, errors, report["fine"]) == (1, "", False)
    assert metabridge(*command, "--strict")[0] == 2
    counts = {"classes": 2, "images": 9, "fewest": 4, "median": 4.5, "most": 5, "obstacle": ""}
    assert report["splits"][0] == {"name": "train", **counts}
    assert report["unreadable"] == [{"image": "train/cat/bad.png", "reason": "it is not an image that Pillow reads"}]
    assert report["duplicates"] == [
        [{"split": "train", "image": "train/dog/0.png"}, {"split": "test", "image": "test/oak/copy.png"}]
    ]
    assert report["sizes"] == [{"width": 8, "height": 8, "images": 18}]
    assert report["modes"] == {"RGB": 18}
    assert report["tasks"] == {"ways": 2, "shots": 1, "queries": 3}
    assert report["versions"] == VERSIONS


def test_diagnose_reports_what_diagnosis_json_contains(metabridge, glyphs, tmp_path):
    small = ("--model", "mlp", "--tasks", 10, "--queries", 5, "--no-kernels", "--device", "cpu")
    status, printed, errors = metabridge("diagnose", "--out", tmp_path, *small, "--json", "-")
    assert status == 0
    report, stored = parse(printed), parse((tmp_path / "diagnosis.json").read_bytes())
    assert report == stored | {"page": str(tmp_path / "index.html"), "versions": VERSIONS}
    assert f"The report is in {tmp_path / 'index.html'}" in errors


def test_search_reports_the_architecture(metabridge, glyphs, tmp_path, monkeypatch):
    command = ("search", "--kernel", "random", "--out", tmp_path, "--json", "-")
    status, printed, errors = metabridge(*command)
    report, architecture = parse(printed), Architecture.load(tmp_path / "architecture.json")
    assert status == 0
    assert Architecture.from_dict(report["architecture"]) == architecture
    assert (report["finished"], report["evaluated"], report["failed"]) == (True, 0, 0)
    assert (report["out"], report["kernel"], report["versions"]) == (str(tmp_path), "random", VERSIONS)
    assert "Next: metabridge train" in errors

    def stop(*_, **__):
        raise TimeLimitError

    monkeypatch.setattr("metabridge.nas.search", stop)
    report = parse(metabridge(*command, "--minutes", 0)[1])
    assert (report["finished"], report["architecture"]) == (False, None)


def test_a_failed_proxy_is_null(metabridge, glyphs, monkeypatch):
    score = ProxyScore(float("inf"), "not positive definite")
    failed = RepeatedScore(score, (score,))
    monkeypatch.setattr("metabridge.nas.score_model", lambda *_, **__: failed)
    report = parse(metabridge("score", "--model", "conv4", "--kernel", "ntk", "--json", "-")[1])
    assert report[0]["proxy"] == "condition number, NTK"
    assert (report[0]["mean"], report[0]["values"], report[0]["failures"]) == (None, [None], ["not positive definite"])


def test_demo_and_reproduce_report_their_result(metabridge, tmp_path, monkeypatch):
    rows = (Row("MAML", "accuracy %", ours=48.9, ci95=0.4, published=48.7, agrees=True),)
    result = Result("glyphs", "quick", 0, {"steps": 5}, Machine("abacus", "2", "3", None), 1.5, rows)
    comparison = Comparison({}, {"maml": {"new": "48.9 ± 0.4 %"}}, None)
    monkeypatch.setattr("metabridge.training.load_model", lambda *_, **__: None)
    monkeypatch.setattr("metabridge.training.evaluate", lambda *_, **__: Score(0.9, 0.01, 200, torch.empty(0)))
    monkeypatch.setattr(Experiment, "run", lambda self, options: Outcome(result, comparison))
    monkeypatch.setattr(Experiment, "draw", lambda self, outcome, file: None)
    monkeypatch.setattr("metabridge.report.demo_page.write", lambda folder, *_, **__: folder / "index.html")
    expected = to_json(asdict(result)) | {"versions": VERSIONS}
    status, printed, errors = metabridge("demo", "--out", tmp_path, "--json", "-")
    builtin = {"accuracy": 0.9, "ci95": 0.01, "tasks": 200}
    assert (status, parse(printed)) == (0, expected | {"builtin": builtin, "page": str(tmp_path / "index.html")})
    assert errors.endswith(f"The page is in {tmp_path / 'index.html'}\n")
    status, printed, errors = metabridge("reproduce", "glyphs", "--out", tmp_path, "--json", "-")
    assert (status, parse(printed)) == (0, expected)
    assert errors.endswith(f"The figure is in {tmp_path / 'glyphs.png'}\n")


@pytest.mark.parametrize("command", [("methods",), ("data", "check", "."), ("train",), ("search",)])
def test_a_folder_is_refused_as_json_file_before_the_work(metabridge, tmp_path, monkeypatch, command):
    for function in ("datasets.load", "datasets.check_dataset"):
        monkeypatch.setattr(f"metabridge.{function}", lambda *_, **__: pytest.fail("the work has started"))
    status, printed, errors = metabridge(*command, "--json", tmp_path)
    assert (status, printed) == (2, "")
    assert errors.endswith(f"{tmp_path} is a folder. Choose a file.\n")
