"""Time one step of FO-ANIL and FO-MAML for all tasks of all runs together, and in a loop over the tasks.

    python benchmarks/anil.py --device cpu --json anil.json

The networks are linear, and the tasks are those of Yüksel et al. 2023, §5. "together" is the library's
`first_order_step`, which computes all tasks of all runs at once. "loop" computes the same gradients for one task at a
time. "engine" computes them with the library's general `Engine`, for one run at a time. All return the same parameters.
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
SETTINGS = AnilSettings()
REPEATS = 5


def step_in_loop(B: Tensor, w: Tensor, points: TaskPoints, adapts: Literal["head", "all"]) -> NetParams:
    """Return the parameters (B, w) of all runs after one step, computed task by task."""
    nets = []
    tasks = points.x_in.shape[1]
    for run in range(len(B)):
        representation, head = B[run], w[run]
        B_grad, w_grad = torch.zeros_like(representation), torch.zeros_like(head)
        for task in range(tasks):
            x, y = points.x_in[run, task], points.y_in[run, task]
            inner_grad = x.T @ (x @ (representation @ head) - y) / len(x)
            adapted_head = head - SETTINGS.alpha * representation.T @ inner_grad
            adapted_body = representation
            if adapts == "all":
                adapted_body = representation - SETTINGS.alpha * torch.outer(inner_grad, head)
            x, y = points.x_out[run, task], points.y_out[run, task]
            outer_grad = x.T @ (x @ (adapted_body @ adapted_head) - y) / len(x)
            B_grad.add_(torch.outer(outer_grad, adapted_head))
            w_grad.add_(adapted_body.T @ outer_grad)
        nets.append((representation - SETTINGS.beta * B_grad / tasks, head - SETTINGS.beta * w_grad / tasks))
    return torch.stack([B for B, _ in nets]), torch.stack([w for _, w in nets])


def engine_step(name: str, B: Tensor, w: Tensor, environments: list[SharedRepresentation]) -> Callable[[], NetParams]:
    """Return a function that takes one step of every run with the library's engine."""
    learner = method(name, steps=1, lr=SETTINGS.alpha)
    net = mlp(B.shape[1], 1, width=B.shape[2], depth=1, activation="linear", bias=False).to(B.device)
    engine = Engine(learner, net, mode="captured" if B.is_cuda else "vectorized")
    episodes = [environment.tasks.to(B.device) for environment in environments]
    params = parameters(learner, net)

    def step() -> NetParams:
        nets = []
        for run, run_episodes in enumerate(episodes):
            with torch.no_grad():
                params["features.1.weight"].copy_(B[run].mT)
                params["head.weight"].copy_(w[run][None])
            grads = engine(params, run_episodes).gradients
            B_grad, w_grad = grads["features.1.weight"].mT, grads["head.weight"][0]
            nets.append((B[run] - SETTINGS.beta * B_grad, w[run] - SETTINGS.beta * w_grad))
        return torch.stack([B for B, _ in nets]), torch.stack([w for _, w in nets])

    return step


def median_seconds(step: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median duration of a step in seconds, after a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    """Time all three implementations, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1000, help="number of tasks per run")
    parser.add_argument("--runs", type=int, default=2, help="number of runs")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="number of CPU threads; a loop uses one")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    environments = [SharedRepresentation(pool=options.tasks, seed=seed) for seed in range(options.runs)]
    episodes = [environment.tasks for environment in environments]
    points = TaskPoints.from_episodes(episodes).to(options.device, torch.float32)
    generators = [torch.Generator().manual_seed(environment.seed) for environment in environments]
    initial_params = [initial_parameters(50, 50, SETTINGS.alpha, generator) for generator in generators]
    B, w = (torch.stack(params).to(options.device, torch.float32) for params in zip(*initial_params))
    rows = []
    for name, adapts in LEARNERS.items():
        repeated = RepeatedStep(partial(first_order_step, points=points, settings=SETTINGS, adapts=adapts), (B, w))
        repeated.advance(1)
        expected = repeated.params[0].clone()
        engine = engine_step(name, B, w, environments)
        for params in (step_in_loop(B, w, points, adapts), engine()):
            torch.testing.assert_close(params[0], expected)
        seconds = median_seconds(partial(repeated.advance, 10), options.device, REPEATS) / 10
        engine_seconds = median_seconds(engine, options.device, REPEATS)
        loop_seconds = median_seconds(partial(step_in_loop, B, w, points, adapts), options.device, 1)
        rows.append(
            {
                "name": name,
                "runs": options.runs,
                "tasks": options.tasks,
                "milliseconds": 1e3 * seconds,
                "engine_milliseconds": 1e3 * engine_seconds,
                "loop_milliseconds": 1e3 * loop_seconds,
                "engine_ratio": engine_seconds / seconds,
                "ratio": loop_seconds / seconds,
            }
        )

    table = Table(title=f"One step of {options.runs} runs of {options.tasks} tasks, {options.device}")
    for heading in ("learner", "together, ms", "engine, ms", "loop, ms", "engine / together", "loop / together"):
        table.add_column(heading, justify="left" if heading == "learner" else "right")
    for row in rows:
        times = [f"{row[key]:.2f}" for key in ("milliseconds", "engine_milliseconds", "loop_milliseconds")]
        table.add_row(str(row["name"]), *times, *(f"{row[key]:.0f}×" for key in ("engine_ratio", "ratio")))
    Console().print(table)
    if options.json:
        environment = asdict(Machine.current(options.device)) | {"threads": options.threads}
        document = {"id": f"bench-anil-{options.device}", "environment": environment, "rows": rows}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
