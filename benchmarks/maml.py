"""Compare the speed and the memory of second-order MAML with other libraries.

Every implementation computes the meta-gradient of conv4 with 32 filters on 5-way 1-shot tasks with 15 queries per class
and 5 inner steps. The implementations are timed in turns, so that noise on the machine affects all of them. On a CPU,
each turn runs in a separate process.

    python benchmarks/maml.py --json results/bench-maml-cpu.json
    python benchmarks/maml.py --device cuda --json results/bench-maml-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import metabridge as mb
from memory import added_peak
from metabridge.report.results import Machine

STEPS, LR = 5, 0.01


def episodes(size: int, tasks: int, device: str) -> mb.Episodes:
    """Return random tasks, since the values of pixels do not change the amount of computation."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if size == 28 else (3, size, size)

    def draw(per_class: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(5).repeat_interleave(per_class).expand(tasks, -1).contiguous()
        return torch.randn(tasks, 5 * per_class, *shape, generator=generator), labels

    return mb.Episodes(*draw(1), *draw(15)).to(device)


def torch_conv4(size: int, device: str) -> nn.Module:
    """Return conv4, built from layers of PyTorch."""
    layers: list[nn.Module] = []
    for in_channels in (1 if size == 28 else 3, 32, 32, 32):
        norm = nn.BatchNorm2d(32, track_running_stats=False)
        layers += [nn.Conv2d(in_channels, 32, 3, padding=1, bias=False), norm, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (size // 16) ** 2, 5)).to(device)


def with_metabridge(mode: str, flat: bool = False) -> Callable[[mb.Episodes, int], Callable[[], object]]:
    """Return a function that, for given tasks and image size, returns a meta-step with metabridge in this mode."""

    def make(batch: mb.Episodes, size: int) -> Callable[[], object]:
        method = mb.method("maml", steps=STEPS, lr=LR)
        net = mb.models.conv4(batch.support_x.shape[2], size).to(batch.device)
        params = mb.parameters(method, net)
        engine = mb.Engine(method, net, mode=mode, flat=flat)  # type: ignore[arg-type]
        return lambda: engine(params, batch)

    return make


def with_higher(batch: mb.Episodes, size: int) -> Callable[[], object]:
    """Return a meta-step with higher: a functional copy of the network and a differentiable optimizer."""
    import higher

    net = torch_conv4(size, str(batch.device))
    inner_optimizer = torch.optim.SGD(net.parameters(), lr=LR)

    def step() -> None:
        net.zero_grad()
        for task in range(len(batch)):
            with higher.innerloop_ctx(net, inner_optimizer, copy_initial_weights=False) as (fast_net, optimizer):
                for _ in range(STEPS):
                    optimizer.step(F.cross_entropy(fast_net(batch.support_x[task]), batch.support_y[task]))
                (F.cross_entropy(fast_net(batch.query_x[task]), batch.query_y[task]) / len(batch)).backward()

    return step


def with_torchopt(batch: mb.Episodes, size: int) -> Callable[[], object]:
    """Return a meta-step with torchopt: a meta-optimizer changes the network in place; each task restores its state."""
    import torchopt

    net = torch_conv4(size, str(batch.device))
    inner_optimizer = torchopt.MetaSGD(net, lr=LR)

    def step() -> None:
        net.zero_grad()
        net_state = torchopt.extract_state_dict(net, by="reference")
        optimizer_state = torchopt.extract_state_dict(inner_optimizer, by="reference")
        for task in range(len(batch)):
            for _ in range(STEPS):
                inner_optimizer.step(F.cross_entropy(net(batch.support_x[task]), batch.support_y[task]))
            loss = F.cross_entropy(net(batch.query_x[task]), batch.query_y[task]) / len(batch)
            torchopt.recover_state_dict(net, net_state)
            torchopt.recover_state_dict(inner_optimizer, optimizer_state)
            loss.backward()

    return step


IMPLEMENTATIONS = {
    "cpu": {
        "metabridge": with_metabridge("workers"),
        "metabridge, memory-flat": with_metabridge("workers", flat=True),
        "metabridge, one task at a time": with_metabridge("loop"),
        "higher": with_higher,
        "torchopt": with_torchopt,
    },
    "cuda": {
        "metabridge": with_metabridge("captured"),
        "metabridge, memory-flat": with_metabridge("captured", flat=True),
        "metabridge, not captured": with_metabridge("vectorized"),
        "higher": with_higher,
    },
}


class Measurement(NamedTuple):
    """The duration of each meta-step in seconds, and the peak memory of meta-steps in MiB."""

    seconds: list[float]
    peak: float


def measure_here(name: str, size: int, tasks: int, device: str, rounds: int) -> Measurement:
    """Measure one implementation in this process."""
    batch = episodes(size, tasks, device)
    meta_step = IMPLEMENTATIONS[device][name](batch, size)
    if device == "cpu":
        peak = added_peak(meta_step)
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        meta_step()
        peak = (torch.cuda.max_memory_reserved() - before) / 2**20
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(rounds):
        synchronize()
        start = time.perf_counter()
        meta_step()
        synchronize()
        seconds.append(time.perf_counter() - start)
    return Measurement(seconds, peak)


def measure(name: str, size: int, tasks: int, device: str, rounds: int) -> Measurement:
    """Measure one implementation; on a CPU in a separate process, since allocators keep the memory of earlier ones."""
    if device == "cuda":
        return measure_here(name, size, tasks, device, rounds)
    command = [sys.executable, __file__, "--measure", name, str(size), str(tasks), str(rounds)]
    return Measurement(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Measure all implementations at all sizes, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cycles", type=int, help="number of turns per implementation (default: 3, or 1 on a GPU)")
    parser.add_argument("--rounds", type=int, default=5, help="number of meta-steps per turn (default: %(default)s)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, *numbers = options.measure
        size, tasks, rounds = map(int, numbers)
        print(json.dumps(measure_here(name, size, tasks, "cpu", rounds)._asdict()))
        return
    device = options.device
    rows = []
    for size, tasks in [(28, 4), (84, 4)] if device == "cpu" else [(28, 4), (28, 32), (84, 4), (84, 32)]:
        turns_by_name: dict[str, list[Measurement]] = {name: [] for name in IMPLEMENTATIONS[device]}
        for _ in track(
            range(options.cycles or (3 if device == "cpu" else 1)), f"{size} px, {tasks} tasks", transient=True
        ):
            for name, turns in turns_by_name.items():
                turns.append(measure(name, size, tasks, device, options.rounds))
        seconds = {
            name: statistics.median(duration for turn in turns for duration in turn.seconds)
            for name, turns in turns_by_name.items()
        }
        memory = {name: statistics.median(turn.peak for turn in turns) for name, turns in turns_by_name.items()}
        peers = [name for name in seconds if not name.startswith("metabridge")]
        fastest, smallest = min(seconds[name] for name in peers), min(memory[name] for name in peers)
        for name in seconds:
            rows.append(
                {
                    "name": name,
                    "size": size,
                    "tasks": tasks,
                    "milliseconds": round(1000 * seconds[name], 1),
                    "speed against the fastest peer": round(fastest / seconds[name], 2),
                    "peak MiB": round(memory[name], 1),
                    "memory against the smallest peer": round(memory[name] / smallest, 2),
                }
            )
    table = Table(title=f"second-order MAML, conv4-32, 5-way 1-shot, {STEPS} steps, {device}")
    for column in ("name", "px", "tasks", "ms", "relative speed", "MiB", "relative memory"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        report = {"id": f"bench-maml-{device}", "environment": asdict(Machine.current(device)), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
