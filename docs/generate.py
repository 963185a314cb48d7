"""Put the numbers of results/*.json, and what the code says of its methods and names, into the pages.

A table stands between `<!-- table NAME -->` and `<!-- end -->`, where NAME is one of `TABLES` or the ID of an
experiment. `python docs/generate.py` writes it anew, and the tests fail when what stands there is not what the
results say.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import metabridge.api
from metabridge.heads import Head
from metabridge.learners.method import PRESETS
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.report.method_table import taxonomy_row
from metabridge.solvers import Solver

ROOT = Path(__file__).resolve().parent.parent
PARTS = (
    "datasets",
    "diagnosis",
    "environments",
    "heads",
    "kernels",
    "learners",
    "models",
    "nas",
    "schedules",
    "solvers",
    "theory",
    "training",
    "use",
)
PACKAGES = ("metabridge", *(f"metabridge.{part}" for part in PARTS))
MANY = 40  # rows of a table that a reader still reads


def stored(name: str) -> dict[str, Any]:
    """Read one result."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    """Lay out a table, its first column to the left and the others to the right."""
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(result: dict[str, Any]) -> str:
    """Say where a result was computed."""
    return f"{result['environment']['device']}, torch {result['environment']['torch']}"


def taxonomy() -> str:
    """Return the table of methods."""
    rows = [[f"`{name}`", *taxonomy_row(method).values()] for name, method in PRESETS.items()]
    table = markdown(["method", *taxonomy_row(PRESETS["maml"])], rows)
    return table.replace("---:", "---")


def solver_table() -> str:
    """Return the table of inner solvers."""
    rows = [
        [f"`{kind.__name__}({signature(kind)})`", first_line(kind), ", ".join(kind.outer_rules)]
        for kind in Solver.registry.values()
    ]
    return markdown(["solver", "what it does", "outer gradients"], rows).replace("---:", "---")


def outer_rule_table() -> str:
    """Return the table of outer gradients."""
    rows = []
    for name, rule in OUTER_RULES.items():
        admitting = [f"`{kind.__name__}`" for kind in Solver.registry.values() if name in kind.outer_rules]
        rows.append([f"`{name}`", first_line(rule.gradient), ", ".join(admitting) or "methods without inner solver"])
    return markdown(["`outer`", "what it does", "admitted by"], rows).replace("---:", "---")


def head_table() -> str:
    """Return the table of test-time heads."""
    rows = [
        [f"`{name}`", f"`{kind.__name__}({signature(kind)})`", first_line(kind), "yes" if kind.calibrated else "no"]
        for name, kind in Head.registry.items()
    ]
    return markdown(["name", "head", "what it does", "probabilities"], rows).replace("---:", "---")


def signature(kind: type[Solver] | type[Head]) -> str:
    """Return the names of the fields of a solver or head."""
    return ", ".join(inspect.signature(kind).parameters)


def first_line(documented: object) -> str:
    """Return the first line of a docstring as a cell of a table."""
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("|", "\\|")


def api(package: str) -> Callable[[], str]:
    """The classes, functions and modules that a package offers, each with the first line of its docstring."""

    def table() -> str:
        module, said = import_module(package), set(metabridge.api.__all__) if package != "metabridge" else set()
        values = {name: getattr(module, name) for name in module.__all__ if name not in said}
        kinds = (type, FunctionType, ModuleType)
        lines = {name: inspect.getdoc(value) or "" for name, value in values.items() if isinstance(value, kinds)}
        rows = [[f"`{name}`", text.partition("\n")[0].replace("|", "\\|")] for name, text in lines.items()]
        return markdown(["name", ""], rows).replace("---:", "---")

    return table


def glyphs(name: str) -> Callable[[], str]:
    """Accuracies on the built-in data."""

    def table() -> str:
        result = stored(name)
        kinds = ["test tasks", "untrained", "same alphabet", "different alphabets"]
        values: dict[str, dict[str, str]] = {}
        for row in result["rows"]:
            method, _, kind = row["name"].partition(", ")
            number = f"{row['ours']:.0f} s" if kind == "training" else f"{row['ours']:.1f} ± {row['ci95']:.1f}"
            values.setdefault(method, {})[kind] = number
        steps = {method: setting["iterations"] for method, setting in result["settings"]["methods"].items()}
        rows = [
            [f"`{method}`", *(found[kind] for kind in kinds), str(steps[method]), found["training"]]
            for method, found in values.items()
        ]
        caption = f"{machine(result)}, seed {result['seed']}; {result['settings']['test_tasks']} test tasks."
        return markdown(["method", *kinds, "iterations", "training"], rows) + f"\n\n{caption}"

    return table


def by_machine(names: list[str], heads: list[str], cells: Callable[[dict[str, Any]], list[str]]) -> Callable[[], str]:
    """A table for every result, under the machine that it was measured on."""

    def tables() -> str:
        results = [stored(name) for name in names]
        return "\n\n".join(
            f"{machine(result)}:\n\n" + markdown(heads, [cells(row) for row in result["rows"]]) for result in results
        )

    return tables


def contender(row: dict[str, Any]) -> list[str]:
    """Speed and memory beside the peers."""
    return [
        row["name"],
        f"{row['size']} px",
        str(row["tasks"]),
        f"{row['milliseconds']:.0f} ms",
        f"{row['speed against the fastest peer']:.2f}×",
        f"{row['peak MiB']:.0f} MiB",
        f"{row['memory against the smallest peer']:.2f}×",
    ]


def head(row: dict[str, Any]) -> list[str]:
    """A test-time head beside scikit-learn's."""
    return [
        row["name"],
        f"{1000 * row['seconds']:.0f} ms",
        f"{row['sklearn_seconds']:.1f} s",
        f"{row['ratio']:.0f}×",
        f"{100 * row['same_predictions']:.2f} %",
    ]


def steps(row: dict[str, Any]) -> list[str]:
    """Memory against inner steps."""
    return [row["mode"], str(row["steps"]), f"{row['peak MiB']:.0f} MiB", f"{row['ratio']:.2f}×"]


def throughput(row: dict[str, Any]) -> list[str]:
    """Images per second of training."""
    return [str(row["batch"]), row["path"], f"{row['images_per_second']:,.0f}", f"{row['share_of_matrix_rate']:.0%}"]


def analytic(row: dict[str, Any]) -> list[str]:
    """Analytic kernels beside neural-tangents, or those on a GPU beside those on its CPU."""
    seconds = row["seconds"], row.get("neural_tangents_seconds") or row["cpu_seconds"]
    return [row["name"], *(f"{1000 * value:.3g} ms" for value in seconds), f"{row['ratio']:.1f}×"]


def empirical(row: dict[str, Any]) -> list[str]:
    """Empirical kernels beside the plain recipe."""
    sizes = [f"{row[key]:.0f} MiB" for key in ("mib", "reference_mib")]
    times = [row["seconds"], row["reference_seconds"], *row.get("huge_pages_seconds", ())]
    ours, plain, *paged = (f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms" for value in times)
    ratios = [f"{row[key]:.1f}×" for key in ("time_ratio", "memory_ratio")]
    return [row["net"], ours, plain, ratios[0], " to ".join(paged), *sizes, ratios[1]]


def beside(name: str) -> str:
    """An experiment's numbers beside the published ones; of very many, those that are judged."""
    result = stored(name)
    judged = [row for row in result["rows"] if row["agrees"] is not None or row["published"] is not None]
    shown = judged if len(result["rows"]) > MANY and judged else result["rows"]
    rows = [
        [
            row["name"],
            row["metric"],
            "" if row["published"] is None else f"{row['published']:.4g}",
            f"{row['ours']:.4g}" + ("" if row["ci95"] is None else f" ± {row['ci95']:.2g}"),
            {True: "yes", False: "no", None: ""}[row["agrees"]],
            row["note"],
        ]
        for row in shown
    ]
    table = markdown(["", "", "published", "ours", "agrees", ""], rows)
    left = (
        f" The other {len(result['rows']) - len(shown)} numbers are in results/{name}.json." if shown is judged else ""
    )
    return f"{table}\n\n{machine(result)}, seed {result['seed']}, {result['seconds'] / 60:.1f} minutes.{left}"


def kernel_fewshot() -> str:
    """Kernels and nets as few-shot classifiers: a line for each learner and what it learnt from."""
    result = stored("kernel-fewshot")
    form = re.compile(r"(\w+, \d-shot), (.+), (support alone|fresh tasks|\d+ tasks(?:, ridge .+?)?)(, gain)?")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        if (parts := form.fullmatch(row["name"])) and row["metric"].startswith("accuracy"):
            kind, learner, learnt_from, gain = parts.groups()
            own = cells.setdefault((learner, learnt_from), {})
            value = f"{row['ours']:{'+' if gain else ''}.1f} ± {row['ci95']:.1f}"
            own[kind] = f"{own[kind]} ({value})" if gain else value
    kinds = list(dict.fromkeys(kind for own in cells.values() for kind in own))
    last = max((name for _, name in cells if re.fullmatch(r"\d+ tasks", name)), key=lambda name: int(name.split()[0]))
    rows = [
        [*key, *(own.get(kind, "") for kind in kinds)]
        for key, own in cells.items()
        if not key[1].endswith("tasks") or key[1] in (last, "fresh tasks")
    ]
    table = markdown(["learner", "learnt from", *kinds], rows)
    return f"{table}\n\n{machine(result)}, seed {result['seed']}; {result['settings']['test_tasks']} test tasks."


def batched(row: dict[str, Any]) -> list[str]:
    """Predictions for many tasks at once beside a loop over them."""
    seconds = [f"{row[key]:.2f} s" for key in ("seconds", "loop_seconds")]
    return [row["name"], *seconds, f"{row['ratio']:.1f}×", f"{row['mebibytes']:.0f} MiB"]


def search() -> str:
    """Candidates of an architecture search, as it computes them and in plain ways, on each machine."""
    return "\n\n".join(_candidates(stored(name)) for name in ("bench-search-cpu", "bench-search-h200"))


def _candidates(result: dict[str, Any]) -> str:
    plain = list(result["search"]["ratios"])
    heads = ["operators on an edge", "search", *(text for way in plain for text in (way, "ratio"))]

    def cells(name: str, row: dict[str, Any], told: Callable[[float], str]) -> list[str]:
        times = ([told(row["seconds"][way]), f"{row['ratios'][way]:.1f}×"] for way in plain)
        return [name, told(row["seconds"]["search"]), *(text for pair in times for text in pair)]

    rows = [cells(str(row["operators"]), row, lambda seconds: f"{1000 * seconds:.0f} ms") for row in result["rows"]]
    rows.append(cells("a whole search", result["search"], lambda seconds: f"{seconds / 60:.1f} min"))
    how = result["settings"]
    where = f"{machine(result)}; {how['cells']} cells, {how['channels']} channels, images of {how['size']} pixels:"
    return f"{where}\n\n{markdown(heads, rows)}"


def fuzz() -> str:
    """What came of damaged and hostile files, a line for each reader."""
    result = stored("fuzz")
    failures = ("tracebacks", "hangs", "crashes", "over_1_gib", "files_outside", "code_run", "silent_differences")
    rows = [
        [
            row["reader"],
            *(f"{row[key]:,}" for key in ("inputs", "refused", "accepted_equal", "accepted_different")),
            f"{sum(row[key] for key in failures):,}",
            f"{row['peak_mib']} MiB",
        ]
        for row in result["readers"]
    ]
    heads = ["reader", "inputs", "refused", "read as before", "read otherwise", "failures", "most memory"]
    return f"{markdown(heads, rows)}\n\n{machine(result)}, seed {result['seed']}."


TABLES: dict[str, Callable[[], str]] = {
    "taxonomy": taxonomy,
    "solvers": solver_table,
    "outer-gradients": outer_rule_table,
    "test-heads": head_table,
    "glyphs": glyphs("glyphs"),
    "demo": glyphs("demo/glyphs"),
    "maml": by_machine(
        ["bench-maml-cpu", "bench-maml-h200"],
        ["", "images", "tasks", "a meta-step", "speed", "peak memory", "memory"],
        contender,
    ),
    "heads": by_machine(
        ["bench-heads-cpu", "bench-heads-h200"],
        ["head", "2000 tasks, ours", "scikit-learn's loop", "ratio", "same predictions"],
        head,
    ),
    "flat": by_machine(["bench-flat-cpu"], ["mode", "inner steps", "peak memory", "against 2 steps"], steps),
    "analytic": by_machine(["bench-ntk-analytic-cpu"], ["points", "ours", "neural-tangents", "ratio"], analytic),
    "analytic-gpu": by_machine(
        ["bench-ntk-analytic-h200"], ["points", "ours", "ours on 2 cores beside it", "ratio"], analytic
    ),
    "empirical": by_machine(
        ["bench-ntk-empirical-cpu", "bench-ntk-empirical-h200"],
        ["net", "ours", "torch.func", "ratio", "with huge pages", "memory", "torch.func", "ratio"],
        empirical,
    ),
    "kernel-fewshot": kernel_fewshot,
    "batched": by_machine(
        ["bench-kernel-predict-cpu"], ["twin", "at once", "in a loop", "ratio", "memory at once"], batched
    ),
    "search": search,
    "fuzz": fuzz,
    "resnet12": by_machine(
        ["bench-resnet12-h200"], ["images a step", "", "images a second", "of the matrix rate"], throughput
    ),
    **{f"api-{name.rpartition('.')[2]}": api(name) for name in PACKAGES},
}


def filled(text: str) -> str:
    """Return the page with every table written anew."""

    def write(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}\n\n{TABLES[name]() if name in TABLES else beside(name)}\n\n<!-- end -->"

    return re.sub(r"(<!-- table ([\w-]+) -->).*?<!-- end -->", write, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
