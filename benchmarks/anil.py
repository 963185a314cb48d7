"""A step of FO-ANIL and FO-MAML on all tasks of all runs at once, against the same work task by task, in one run.

    python benchmarks/anil.py --device cpu --json anil.json

The nets are linear and the tasks those of D §5. "Loop" writes the same gradients out for one task after the other;
"engine" is the library's general meta-gradient of the same learner, one run after the other. All end in the same nets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from metabridge.environments import SharedRepresentation
from metabridge.learners import Engine, method, parameters
from metabridge.models import mlp
from metabridge.report.results import Machine
from metabridge.theory.anil import AnilSettings, initial_parameters
from metabridge.theory.finite_tasks import NetParams, RepeatedStep, TaskPoints, first_order_step

LEARNERS: dict[str, Literal["head", "all"]] = {"fo-anil": "head", "fo-maml": "all"}
RATES = AnilSettings()
REPEATS = 5


def looped(B: Tensor, w: Tensor, points: TaskPoints, adapts: Literal["head", "all"]) -> NetParams:
    """Return the nets after one step, computed task by task."""
    nets = []
    tasks = points.x_in.shape[1]
    for run in range(len(B)):
        own, head = B[run], w[run]
        slopes = torch.zeros_like(own), torch.zeros_like(head)
        for task in range(tasks):
            x, y = points.x_in[run, task], points.y_in[run, task]
            inner = x.T @ (x @ (own @ head) - y) / len(x)
            adapted = head - RATES.alpha * own.T @ inner
            body = own - RATES.alpha * torch.outer(inner, head) if adapts == "all" else own
            x, y = points.x_out[run, task], points.y_out[run, task]
            outer = x.T @ (x @ (body @ adapted) - y) / len(x)
            slopes[0].add_(torch.outer(outer, adapted))
            slopes[1].add_(body.T @ outer)
        nets.append((own - RATES.beta * slopes[0] / tasks, head - RATES.beta * slopes[1] / tasks))
    return torch.stack([own for own, _ in nets]), torch.stack([head for _, head in nets])


def by_engine(name: str, B: Tensor, w: Tensor, worlds: list[SharedRepresentation]) -> Callable[[], NetParams]:
    """Return a function that takes one step of every run with the library's engine."""
    learner = method(name, steps=1, lr=RATES.alpha)
    net = mlp(B.shape[1], 1, width=B.shape[2], depth=1, activation="linear", bias=False).to(B.device)
    engine = Engine(learner, net, mode="captured" if B.is_cuda else "vectorised")
    episodes = [world.tasks.to(B.device) for world in worlds]
    params = parameters(learner, net)

    def step() -> NetParams:
        nets = []
        for run, own in enumerate(episodes):
            with torch.no_grad():
                params["features.1.weight"].copy_(B[run].mT)
                params["head.weight"].copy_(w[run][None])
            slopes = engine(params, own).gradients
            body, head = slopes["features.1.weight"].mT, slopes["head.weight"][0]
            nets.append((B[run] - RATES.beta * body, w[run] - RATES.beta * head))
        return torch.stack([own for own, _ in nets]), torch.stack([head for _, head in nets])

    return step


def timed(step: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median seconds of a step, after a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    """Run the contests, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, help="tasks of a run")
    parser.add_argument("--runs", type=int, default=2, help="runs side by side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, of which a loop uses one")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    worlds = [SharedRepresentation(pool=options.tasks, seed=seed) for seed in range(options.runs)]
    points = TaskPoints.from_episodes([world.tasks for world in worlds]).to(options.device, torch.float32)
    starts = [initial_parameters(50, 50, RATES.alpha, torch.Generator().manual_seed(world.seed)) for world in worlds]
    B, w = (torch.stack(part).to(options.device, torch.float32) for part in zip(*starts))
    rows = []
    for name, adapts in LEARNERS.items():
        iteration = RepeatedStep(partial(first_order_step, points=points, settings=RATES, adapts=adapts), (B, w))
        iteration.advance(1)
        ours = iteration.params[0].clone()
        engine = by_engine(name, B, w, worlds)
        for other in (looped(B, w, points, adapts), engine()):
            torch.testing.assert_close(other[0], ours)
        seconds = timed(partial(iteration.advance, 10), options.device, REPEATS) / 10
        general = timed(engine, options.device, REPEATS)
        loop = timed(partial(looped, B, w, points, adapts), options.device, 1)
        rows.append(
            {
                "name": name,
                "runs": options.runs,
                "tasks": options.tasks,
                "milliseconds": 1e3 * seconds,
                "engine_milliseconds": 1e3 * general,
                "loop_milliseconds": 1e3 * loop,
                "engine_ratio": general / seconds,
                "ratio": loop / seconds,
            }
        )

    table = Table(title=f"One step of {options.runs} runs of {options.tasks} tasks, {options.device}")
    for heading in ("learner", "ours, ms", "engine, ms", "loop, ms", "engine over ours", "loop over ours"):
        table.add_column(heading, justify="left" if heading == "learner" else "right")
    for row in rows:
        times = [f"{row[key]:.2f}" for key in ("milliseconds", "engine_milliseconds", "loop_milliseconds")]
        table.add_row(str(row["name"]), *times, *(f"{row[key]:.0f}×" for key in ("engine_ratio", "ratio")))
    Console().print(table)
    if options.json:
        here = asdict(Machine.current(options.device)) | {"threads": options.threads}
        document = {"id": f"bench-anil-{options.device}", "environment": here, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
