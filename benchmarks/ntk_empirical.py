"""The empirical NTK of all outputs, for conv4 with group norm and for an MLP: metabridge against torch.func.

    python benchmarks/ntk_empirical.py --device cpu --json ntk-empirical.json

The torch.func recipe takes `jacrev` of every output under `vmap` over the images, and contracts the Jacobians of every
parameter with einsum. Both compute the same kernel in full single precision (no TF32), alternately in separate
processes. metabridge's first call measures the network and is timed separately; on a GPU the second call captures the
computation as a CUDA graph, and later calls replay it.

metabridge makes PyTorch use huge pages on Linux. The recipe is timed without them, as in PyTorch alone, and on a CPU
also with them. As its times with huge pages vary widely, their minimum and maximum are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from memory import added_peak
from metabridge.kernels.empirical import EmpiricalKernel
from metabridge.models import conv4, mlp
from metabridge.models.network import with_group_norm
from metabridge.report.results import Machine

SIDES = ("metabridge", "torch.func")
RUNS = ((SIDES[0], "1"), (SIDES[1], "0"), (SIDES[1], "1"))  # with huge pages ('1') or without; the last on a CPU only
NETS = ("conv4", "mlp")
OUTPUTS, WIDTH = 5, 256


def torch_func_ntk(net: nn.Module, x: Tensor) -> Tensor:
    """Return Θ, (n, n, k, k), as in the tutorial of torch.func."""
    params = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(params: dict[str, Tensor], point: Tensor) -> Tensor:
        return functional_call(net, params, (point.unsqueeze(0),)).squeeze(0)  # type: ignore[no-any-return]

    jacobian = vmap(jacrev(outputs), (None, 0))(params, x)
    parts = [torch.einsum("iop,jup->ijou", value.flatten(2), value.flatten(2)) for value in jacobian.values()]
    return torch.stack(parts).sum(0)


def measure(side: str, options: argparse.Namespace) -> dict[str, object]:
    """Return the seconds of the first and of the later calls, the peak memory in MiB, and some entries of the kernel.

    The peak is that of all calls on a GPU, where the second call captures a graph, and of a first call on a CPU.
    """
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False
    plain = (
        conv4(3, options.size, OUTPUTS) if options.net == "conv4" else mlp(3 * options.size**2, OUTPUTS, width=WIDTH)
    )
    net = with_group_norm(plain).to(options.device)
    x = torch.randn(options.images, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    x = x.to(options.device)

    def make_compute() -> Callable[[], Tensor]:
        if side == SIDES[1]:
            return lambda: torch_func_ntk(net, x)
        kernel = EmpiricalKernel(net, outputs="full", memory=options.memory * 2**20)
        return lambda: kernel.ntk(x)

    on_gpu = options.device == "cuda"
    peak = 0.0 if on_gpu else added_peak(make_compute(), times=1)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    compute, seconds = make_compute(), []
    for _ in range(1 + options.repeats):
        start = time.perf_counter()
        ntk = compute()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if on_gpu:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    first, *later = seconds
    return {"seconds": later, "first": first, "mib": peak, "entries": ntk[::17, ::13].flatten().tolist()}


def compare(net: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run both libraries alternately, and return medians, their ratios and the difference of the kernels."""
    results: list[list[Any]] = [[] for _ in (RUNS if options.device == "cpu" else SIDES)]
    for _ in range(options.turns):
        for turns, (side, pages) in zip(results, RUNS):
            command = [sys.executable, *sys.argv, "--side", side, "--net", net]
            if net == "mlp":
                command += ["--size", "28"]
            environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": pages}
            turns.append(
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
            )
    times = [[s for turn in turns for s in turn["seconds"]] for turns in results]
    (seconds, reference_seconds), huge_pages = map(statistics.median, times[:2]), times[2:]
    mib, reference_mib = (statistics.median(turn["mib"] for turn in turns) for turns in results[:2])
    entries, exact = (torch.tensor(turns[0]["entries"]) for turns in results[:2])
    return {
        "net": net,
        "seconds": seconds,
        "reference_seconds": reference_seconds,
        "time_ratio": reference_seconds / seconds,
        "huge_pages_seconds": [extreme(times) for times in huge_pages for extreme in (min, max)],
        "first_seconds": statistics.median(turn["first"] for turn in results[0]),
        "mib": mib,
        "reference_mib": reference_mib,
        "memory_ratio": reference_mib / mib,
        "difference": float((entries - exact).norm() / exact.norm()),
    }


def main() -> None:
    """Run both libraries, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--size", type=int, default=84, help="side of the images for conv4 in pixels (28 for the MLP)")
    parser.add_argument("--memory", type=int, default=1024, help="memory of metabridge in MiB")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--turns", type=int, help="turns of each library (default: 3, or 1 on a GPU)")
    parser.add_argument("--repeats", type=int, help="timed calls in a turn (default: 2, or 10 on a GPU)")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    parser.add_argument("--net", choices=NETS, default="conv4", help=argparse.SUPPRESS)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.turns = options.turns or (3 if options.device == "cpu" else 1)
    options.repeats = options.repeats or (2 if options.device == "cpu" else 10)
    if options.side:
        print(json.dumps(measure(options.side, options)))
        return

    rows = [compare(net, options) for net in NETS]
    table = Table(title=f"empirical NTK, {options.images} images, {OUTPUTS} outputs, {options.device}")
    times, sizes = (
        ("metabridge, s", "first call, s", "torch.func, s", "ratio"),
        ("metabridge, MiB", "torch.func, MiB", "ratio"),
    )
    for heading in ("net", *times, "huge pages, s", *sizes, "difference"):
        table.add_column(heading, justify="left" if heading == "net" else "right")
    for row in rows:
        seconds = [f"{row[key]:.4f}" for key in ("seconds", "first_seconds", "reference_seconds")]
        huge_pages = " to ".join(f"{value:.4f}" for value in row["huge_pages_seconds"])
        mib = f"{row['mib']:.0f}", f"{row['reference_mib']:.0f}", f"{row['memory_ratio']:.1f}"
        table.add_row(
            str(row["net"]), *seconds, f"{row['time_ratio']:.2f}", huge_pages, *mib, f"{row['difference']:.0e}"
        )
    Console(width=140).print(table)
    if options.json:
        settings = {name: getattr(options, name) for name in ("images", "size", "memory", "turns", "repeats")}
        report = {
            "id": f"bench-ntk-empirical-{options.device}",
            "environment": {**asdict(Machine.current(options.device)), "threads": options.threads},
            "settings": {**settings, "outputs": OUTPUTS, "mlp_width": WIDTH},
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
