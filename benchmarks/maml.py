"""Second-order MAML beside its peers: one run, the same work, and ratios.

The work is one meta-gradient of conv4 with 32 filters on 5-way 1-shot tasks with 15 queries a class
and 5 inner steps. Contenders take turns, so that a noisy machine is noisy for all, on a CPU each in a
process of its own.

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
    """Return random tasks: the numbers in the images do not change the work."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28) if size == 28 else (3, size, size)

    def draw(points: int) -> tuple[Tensor, Tensor]:
        labels = torch.arange(5).repeat_interleave(points).expand(tasks, -1).contiguous()
        return torch.randn(tasks, 5 * points, *shape, generator=generator), labels

    return mb.Episodes(*draw(1), *draw(15)).to(device)


def peer_net(size: int, device: str) -> nn.Module:
    """Return the same network out of PyTorch's own layers."""
    layers: list[nn.Module] = []
    for inputs in (1 if size == 28 else 3, 32, 32, 32):
        norm = nn.BatchNorm2d(32, track_running_stats=False)
        layers += [nn.Conv2d(inputs, 32, 3, padding=1, bias=False), norm, nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (size // 16) ** 2, 5)).to(device)


def ours(mode: str, flat: bool = False) -> Callable[[mb.Episodes, int], Callable[[], object]]:
    """Return a contender: metabridge with one of its engines."""

    def make(batch: mb.Episodes, size: int) -> Callable[[], object]:
        method = mb.method("maml", steps=STEPS, lr=LR)
        net = mb.models.conv4(batch.support_x.shape[2], size).to(batch.device)
        params = mb.parameters(method, net)
        engine = mb.Engine(method, net, mode=mode, flat=flat)  # type: ignore[arg-type]
        return lambda: engine(params, batch)

    return make


def with_higher(batch: mb.Episodes, size: int) -> Callable[[], object]:
    """higher's way: a functional copy of the net and a differentiable optimizer."""
    import higher

    net = peer_net(size, str(batch.device))
    inner = torch.optim.SGD(net.parameters(), lr=LR)

    def step() -> None:
        net.zero_grad()
        for task in range(len(batch)):
            with higher.innerloop_ctx(net, inner, copy_initial_weights=False) as (fast, differentiable):
                for _ in range(STEPS):
                    differentiable.step(F.cross_entropy(fast(batch.support_x[task]), batch.support_y[task]))
                (F.cross_entropy(fast(batch.query_x[task]), batch.query_y[task]) / len(batch)).backward()

    return step


def with_torchopt(batch: mb.Episodes, size: int) -> Callable[[], object]:
    """torchopt's way: a meta-optimizer that changes the net in place, and its state put back after each task."""
    import torchopt

    net = peer_net(size, str(batch.device))
    inner = torchopt.MetaSGD(net, lr=LR)

    def step() -> None:
        net.zero_grad()
        start = torchopt.extract_state_dict(net, by="reference"), torchopt.extract_state_dict(inner, by="reference")
        for task in range(len(batch)):
            for _ in range(STEPS):
                inner.step(F.cross_entropy(net(batch.support_x[task]), batch.support_y[task]))
            loss = F.cross_entropy(net(batch.query_x[task]), batch.query_y[task]) / len(batch)
            torchopt.recover_state_dict(net, start[0])
            torchopt.recover_state_dict(inner, start[1])
            loss.backward()

    return step


CONTENDERS = {
    "cpu": {
        "metabridge": ours("workers"),
        "metabridge, memory-flat": ours("workers", flat=True),
        "metabridge, one task at a time": ours("loop"),
        "higher": with_higher,
        "torchopt": with_torchopt,
    },
    "cuda": {
        "metabridge": ours("captured"),
        "metabridge, memory-flat": ours("captured", flat=True),
        "metabridge, not captured": ours("vectorized"),
        "higher": with_higher,
    },
}


class Measured(NamedTuple):
    """The seconds of each meta-step, and the MiB that they add at their peak."""

    seconds: list[float]
    peak: float


def measure_here(name: str, size: int, tasks: int, device: str, rounds: int) -> Measured:
    """Measure one contender in this process."""
    batch = episodes(size, tasks, device)
    work = CONTENDERS[device][name](batch, size)
    if device == "cpu":
        peak = added_peak(work)
    else:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        work()
        peak = (torch.cuda.max_memory_reserved() - before) / 2**20
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(rounds):
        wait()
        started = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - started)
    return Measured(times, peak)


def measure(name: str, size: int, tasks: int, device: str, rounds: int) -> Measured:
    """Measure one contender, on a CPU in a process of its own: allocators remember what ran before."""
    if device == "cuda":
        return measure_here(name, size, tasks, device, rounds)
    command = [sys.executable, __file__, "--measure", name, str(size), str(tasks), str(rounds)]
    return Measured(**json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def main() -> None:
    """Run all contenders at all sizes and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--cycles", type=int, help="how often the contenders take turns (3 on a CPU, 1 on a GPU)")
    parser.add_argument("--rounds", type=int, default=5, help="meta-steps in a turn")
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
        turns: dict[str, list[Measured]] = {name: [] for name in CONTENDERS[device]}
        for _ in track(
            range(options.cycles or (3 if device == "cpu" else 1)), f"{size} px, {tasks} tasks", transient=True
        ):
            for name, measured in turns.items():
                measured.append(measure(name, size, tasks, device, options.rounds))
        median = {name: statistics.median(t for turn in taken for t in turn.seconds) for name, taken in turns.items()}
        memory = {name: statistics.median(turn.peak for turn in taken) for name, taken in turns.items()}
        peers = [name for name in median if not name.startswith("metabridge")]
        fastest, smallest = min(median[name] for name in peers), min(memory[name] for name in peers)
        for name in median:
            rows.append(
                {
                    "name": name,
                    "size": size,
                    "tasks": tasks,
                    "milliseconds": round(1000 * median[name], 1),
                    "speed against the fastest peer": round(fastest / median[name], 2),
                    "peak MiB": round(memory[name], 1),
                    "memory against the smallest peer": round(memory[name] / smallest, 2),
                }
            )
    table = Table(title=f"second-order MAML, conv4-32, 5-way 1-shot, {STEPS} steps, {device}")
    for column in ("name", "px", "tasks", "ms", "speed", "MiB", "memory"):  # speed and memory against the best peer
        table.add_column(column, justify="left" if column == "name" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if options.json:
        report = {"id": f"bench-maml-{device}", "environment": asdict(Machine.current(device)), "rows": rows}
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
