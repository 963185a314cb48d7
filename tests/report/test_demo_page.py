from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from metabridge.experiments import ExperimentOptions
from metabridge.experiments.glyph_methods import EXPERIMENT, SETTINGS
from metabridge.report import demo_page, figures, task_pictures
from metabridge.training import Score, load_model


@pytest.fixture
def outcome(tiny):
    return EXPERIMENT.run(ExperimentOptions("quick", progress=False))


def write(outcome, folder):
    score = Score.of(torch.tensor([0.9, 1.0]))
    return demo_page.write(folder, outcome.result, *outcome.data, builtin=load_model("characters"), builtin_score=score)


class Table(HTMLParser):
    """Collects the cells of the page's table, row by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.inside = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.lines.append([])
        self.inside = tag in ("td", "th")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.lines[-1].append(data)


def test_the_page_contains_its_pictures_and_loads_no_files(outcome, tmp_path):
    html = write(outcome, tmp_path).read_text()
    sources = re.findall(r'(?:src|srcset|href)="([^"]*)"', html)
    # For each of two themes: two learning curves, the accuracies, the built-in model's tasks and those of each method.
    assert len(sources) == 2 * (4 + len(outcome.data.runs))
    for source in sources:
        assert base64.b64decode(source.removeprefix("data:image/png;base64,"), validate=True).startswith(b"\x89PNG")
    assert "url(" not in html
    assert "<script" not in html


def test_the_table_shows_the_scores_of_the_outcome(outcome, tmp_path):
    heading, *lines = Table(write(outcome, tmp_path).read_text()).lines
    assert [line[0] for line in lines] == list(outcome.data.runs)
    for line, (name, run) in zip(lines, outcome.data.runs.items()):
        cells = dict(zip(heading, line, strict=True))
        for kind, score in outcome.data.scores[name].items():
            assert cells[kind] == f"{100 * score.mean:.1f} ± {100 * score.ci95:.1f}"
        assert cells["iterations"] == str(SETTINGS["quick"].methods[name].iterations)
        assert cells["adapts"] == run.method.adapts


def test_the_pictures_are_in_the_folder_of_the_page(outcome, tmp_path):
    write(outcome, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "index.html",
        "accuracies.png",
        "learning-curves-iterations.png",
        "learning-curves-seconds.png",
        *(f"tasks-{name}.png" for name in ("built-in", *outcome.data.runs)),
    }


def test_the_page_says_how_to_run_it_again(outcome, tmp_path):
    html = write(outcome, tmp_path).read_text()
    assert "metabridge reproduce glyphs --scale quick --seed 0" in html
    assert outcome.result.environment.device in html


def test_the_page_shows_the_built_in_model_and_how_to_use_it(outcome, tmp_path):
    html = write(outcome, tmp_path).read_text()
    assert "<strong>95.0 ± 63.5 %</strong>" in html
    assert "metabridge adapt --model characters --support labeled --query unlabeled" in html


def test_frames_are_green_if_and_only_if_the_prediction_is_correct(outcome):
    run = outcome.data.runs["anil"]
    episodes = outcome.data.test_environment.sample(3, torch.Generator().manual_seed(0))
    # (tasks, classes, queries per class)
    num_correct = (run.predict(episodes).argmax(-1) == episodes.query_y).view(3, 5, 15)[:, :, :2].sum().item()
    canvas = np.asarray(task_pictures.picture(run, episodes, queries_per_class=2).axes[0].images[0].get_array())
    counts = {}
    for color in (task_pictures.CORRECT, task_pictures.WRONG):
        counts[color] = int((np.abs(canvas - to_rgb(color)).max(-1) < 1e-3).sum())
    frame_pixels = 34 * 34 - 28 * 28  # 3 pixels around an image of 28×28 pixels
    num_wrong = 3 * 5 * 2 - num_correct
    assert counts == {task_pictures.CORRECT: num_correct * frame_pixels, task_pictures.WRONG: num_wrong * frame_pixels}


@pytest.mark.parametrize("x_axis", ["iterations", "seconds"])
def test_a_learning_curve_passes_through_the_validation_scores(outcome, x_axis):
    run = outcome.data.runs["anil"]
    (line,) = figures.learning_curves({"anil": run}, x_axis).axes[0].lines
    xs = [getattr(point, {"iterations": "iteration"}.get(x_axis, x_axis)) for point in run.curve]
    np.testing.assert_allclose(line.get_xdata(), xs)
    np.testing.assert_allclose(line.get_ydata(), [100 * point.score.mean for point in run.curve])


def test_the_figure_of_accuracies_has_a_row_for_every_method():
    score = Score.of(torch.tensor([0.4, 0.6]))
    names = [f"method {index}" for index in range(14)]
    axes = figures.accuracies({name: {"test tasks": score, "untrained": score} for name in names}).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
