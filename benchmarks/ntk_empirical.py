"""Compare the empirical NTK of conv4 with group norm and of an MLP, for all outputs, with torch.func.

    python benchmarks/ntk_empirical.py --device cpu --json ntk-empirical.json

With torch.func, `jacrev` of every output is computed under `vmap` over the images, and the Jacobians of every parameter
are contracted by einsum. Both compute the same kernel in full single precision (no TF32), in turns in separate
processes. The first call of metabridge profiles the network and is timed separately; on a GPU, the second call captures
the computation as a CUDA graph, and later calls replay it.

metabridge makes PyTorch use huge pages on Linux. torch.func is timed without them, as in PyTorch alone, and on a CPU
also with them. Because its times with huge pages vary widely, their minimum and maximum are reported.
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

LIBRARIES = ("metabridge", "torch.func")
# The library and whether huge pages are used ("1") or not ("0"). The last one runs on a CPU only.
VARIANTS = ((LIBRARIES[0], "1"), (LIBRARIES[1], "0"), (LIBRARIES[1], "1"))
NETS = ("conv4", "mlp")
OUTPUTS, WIDTH = 5, 256


def torch_func_ntk(net: nn.Module, x: Tensor) -> Tensor:
    """Return Θ, (n, n, k, k), computed as in the tutorial of torch.func."""
    params = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(params: dict[str, Tensor], image: Tensor) -> Tensor:
        return functional_call(net, params, (image.unsqueeze(0),)).squeeze(0)  # type: ignore[no-any-return]

    jacobians = vmap(jacrev(outputs), (None, 0))(params, x)
    kernels = [torch.einsum("iop,jup->ijou", value.flatten(2), value.flatten(2)) for value in jacobians.values()]
    return torch.stack(kernels).sum(0)


def measure(library: str, options: argparse.Namespace) -> dict[str, object]:
    """Return the times of the first and of later calls, the peak memory in MiB, and some entries of the kernel.

    The peak is measured over all calls on a GPU, where the second call captures a graph, and over a first call on a
    CPU.
    """
    torch.set_num_threads(options.threads)
    torch.backends.cudnn.allow_tf32 = False
    base_net = (
        conv4(3, options.size, OUTPUTS) if options.net == "conv4" else mlp(3 * options.size**2, OUTPUTS, width=WIDTH)
    )
    net = with_group_norm(base_net).to(options.device)
    x = torch.randn(options.images, 3, options.size, options.size, generator=torch.Generator().manual_seed(0))
    x = x.to(options.device)

    def make_compute() -> Callable[[], Tensor]:
        if library == LIBRARIES[1]:
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
    """Run both libraries in turns, and return medians, their ratios and the relative difference of the kernels."""
    results: list[list[Any]] = [[] for _ in (VARIANTS if options.device == "cpu" else VARIANTS[:2])]
    for _ in range(options.turns):
        for turns, (library, huge_pages) in zip(results, VARIANTS):
            command = [sys.executable, *sys.argv, "--library", library, "--net", net]
            if net == "mlp":
                command += ["--size", "28"]
            environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": huge_pages}
            turns.append(
                json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
            )
    times = [[seconds for turn in turns for seconds in turn["seconds"]] for turns in results]
    (seconds, reference_seconds), huge_pages_times = map(statistics.median, times[:2]), times[2:]
    mib, reference_mib = (statistics.median(turn["mib"] for turn in turns) for turns in results[:2])
    entries, reference_entries = (torch.tensor(turns[0]["entries"]) for turns in results[:2])
    return {
        "net": net,
        "seconds": seconds,
        "reference_seconds": reference_seconds,
        "time_ratio": reference_seconds / seconds,
        "huge_pages_seconds": [extreme(times) for times in huge_pages_times for extreme in (min, max)],
        "first_seconds": statistics.median(turn["first"] for turn in results[0]),
        "mib": mib,
        "reference_mib": reference_mib,
        "memory_ratio": reference_mib / mib,
        "difference": float((entries - reference_entries).norm() / reference_entries.norm()),
    }


def main() -> None:
    """Run both libraries, print the table, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument(
        "--size", type=int, default=84, help="width and height of the images for conv4 (28 for the MLP)"
    )
    parser.add_argument("--memory", type=int, default=1024, help="memory of metabridge in MiB")
    parser.add_argument("--threads", type=int, default=2, help="number of CPU threads")
    parser.add_argument("--turns", type=int, help="number of turns per library (default: 3, or 1 on a GPU)")
    parser.add_argument("--repeats", type=int, help="number of timed calls per turn (default: 2, or 10 on a GPU)")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    parser.add_argument("--net", choices=NETS, default="conv4", help=argparse.SUPPRESS)
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.turns = options.turns or (3 if options.device == "cpu" else 1)
    options.repeats = options.repeats or (2 if options.device == "cpu" else 10)
    if options.library:
        print(json.dumps(measure(options.library, options)))
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
