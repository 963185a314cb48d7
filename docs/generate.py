"""Write the tables of the docs: numbers from results/*.json, and names and descriptions from the code.

A table is between `<!-- table NAME -->` and `<!-- end -->`, where NAME is a key of `TABLES` or the ID of an experiment.
`python docs/generate.py` replaces all tables. The tests fail if a page contains a table that differs from the generated
one.
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
from metabridge.cli.config_options import flag_name
from metabridge.heads import Head
from metabridge.learners.method import PRESETS
from metabridge.learners.outer_gradients import OUTER_RULES
from metabridge.report.method_table import taxonomy_row
from metabridge.schedules import Schedule
from metabridge.solvers import Solver
from metabridge.training.config import METHOD_DEFAULTS, ImageTrainingConfig, default_config, options_of

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = (
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
    "inference",
)
PACKAGES = ("metabridge", *(f"metabridge.{name}" for name in SUBPACKAGES))
MAX_ROWS = 40  # results with more rows are shortened to the compared rows


def load_result(name: str) -> dict[str, Any]:
    """Return the content of results/NAME.json."""
    return json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table. The first column is left-aligned, the others are right-aligned."""
    lines = [headers, ["---"] + ["---:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def builtin_models() -> str:
    """Return the accuracies of the built-in models, with one row per data set and one column per number of shots."""
    result = load_result("builtin-models")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        model, data, task = row["name"].split(", ")
        cells.setdefault((model, data), {})[task] = f"{row['ours']:.1f} ± {row['ci95']:.1f} %"
    tasks = list(next(iter(cells.values())))
    rows = [[f"`{model}`", data, *values.values()] for (model, data), values in cells.items()]
    return (
        f"{markdown_table(['model', 'new classes', *tasks], rows)}\n\n{result['rows'][0]['note']}. {machine(result)}."
    )


def machine(result: dict[str, Any]) -> str:
    """Return the device and the PyTorch version that computed a result."""
    return correct_plural(f"{result['environment']['device']}, torch {result['environment']['torch']}")


def correct_plural(text: str) -> str:
    """Return a text with "1 core" instead of "1 cores"."""
    return re.sub(r"\b1 cores\b", "1 core", text)


def taxonomy() -> str:
    """Return the table of methods."""
    rows = [[f"`{name}`", *taxonomy_row(method).values()] for name, method in PRESETS.items()]
    table = markdown_table(["method", *taxonomy_row(PRESETS["maml"])], rows)
    return table.replace("---:", "---")


def solver_table() -> str:
    """Return the table of inner solvers."""
    rows = [
        [f"`{kind.__name__}({signature(kind)})`", first_line(kind), ", ".join(kind.outer_rules)]
        for kind in Solver.registry.values()
    ]
    return markdown_table(["solver", "what it does", "outer gradients"], rows).replace("---:", "---")


def outer_rule_table() -> str:
    """Return the table of outer gradients."""
    rows = []
    for name, rule in OUTER_RULES.items():
        supporting = [f"`{kind.__name__}`" for kind in Solver.registry.values() if name in kind.outer_rules]
        rows.append([f"`{name}`", first_line(rule.gradient), ", ".join(supporting) or "methods without inner solver"])
    return markdown_table(["`outer`", "what it does", "supported by"], rows).replace("---:", "---")


def head_table() -> str:
    """Return the table of test-time heads."""
    rows = [
        [f"`{name}`", f"`{kind.__name__}({signature(kind)})`", first_line(kind), "yes" if kind.calibrated else "no"]
        for name, kind in Head.registry.items()
    ]
    return markdown_table(["name", "head", "what it does", "probabilities"], rows).replace("---:", "---")


def training_defaults() -> str:
    """Return the table of the training options whose defaults differ between methods."""
    configs = {
        "other methods": default_config("maml"),
        **{f"`{name}`": METHOD_DEFAULTS[name] for name in METHOD_DEFAULTS},
    }
    rows = []
    for name, option in options_of(ImageTrainingConfig).items():
        values = [getattr(config, name) for config in configs.values()]
        if name != "method" and any(value != values[0] for value in values):
            texts = [type(value).__name__.lower() if isinstance(value, Schedule) else str(value) for value in values]
            rows.append([f"`{flag_name(option)}`", *texts])
    return markdown_table(["option", *configs], rows)


def signature(kind: type[Solver] | type[Head]) -> str:
    """Return the names of the fields of a solver or head."""
    return ", ".join(inspect.signature(kind).parameters)


def first_line(documented: object) -> str:
    """Return the first line of an object's docstring as a table cell."""
    return (inspect.getdoc(documented) or "").partition("\n")[0].replace("|", "\\|")


def api_table(package: str) -> Callable[[], str]:
    """Return a function that returns the table of the public classes, functions and modules of a package.

    Tables of subpackages omit the names that `metabridge` itself exports.
    """

    def table() -> str:
        module = import_module(package)
        omitted = set() if package == "metabridge" else set(metabridge.api.__all__)
        values = {name: getattr(module, name) for name in module.__all__ if name not in omitted}
        documented = (type, FunctionType, ModuleType)
        rows = [[f"`{name}`", first_line(value)] for name, value in values.items() if isinstance(value, documented)]
        return markdown_table(["name", "description"], rows).replace("---:", "---")

    return table


def glyph_table(name: str) -> Callable[[], str]:
    """Return a function that returns the table of accuracies of a result on the built-in glyphs."""

    def table() -> str:
        result = load_result(name)
        tests = ["test tasks", "untrained", "same alphabet", "different alphabets"]
        cells: dict[str, dict[str, str]] = {}
        for row in result["rows"]:
            method, _, quantity = row["name"].partition(", ")
            number = f"{row['ours']:.0f} s" if quantity == "training" else f"{row['ours']:.1f} ± {row['ci95']:.1f}"
            cells.setdefault(method, {})[quantity] = number
        iterations = {method: settings["iterations"] for method, settings in result["settings"]["methods"].items()}
        headers = ["method", *("trained" if test == "test tasks" else test for test in tests), "iterations", "training"]
        rows = [
            [f"`{method}`", *(numbers[test] for test in tests), str(iterations[method]), numbers["training"]]
            for method, numbers in cells.items()
        ]
        caption = f"{machine(result)}, seed {result['seed']}; {result['settings']['test_tasks']} test tasks."
        return markdown_table(headers, rows) + f"\n\n{caption}"

    return table


def benchmark_tables(
    names: list[str], headers: list[str], cells: Callable[[dict[str, Any]], list[str]]
) -> Callable[[], str]:
    """Return a function that returns one table per result, each below the name of its machine.

    Args:
        names: Names of the results.
        headers: Column headers.
        cells: Returns the cells of a row of a result.
    """

    def tables() -> str:
        results = [load_result(name) for name in names]
        return "\n\n".join(
            f"{machine(result)}:\n\n" + markdown_table(headers, [cells(row) for row in result["rows"]])
            for result in results
        )

    return tables


def library_cells(row: dict[str, Any]) -> list[str]:
    """Return the speed and the memory of a library, compared with other libraries."""
    return [
        row["name"],
        f"{row['size']} px",
        str(row["tasks"]),
        f"{row['milliseconds']:.0f} ms",
        f"{row['speed against the fastest peer']:.2f}×",
        f"{row['peak MiB']:.0f} MiB",
        f"{row['memory against the smallest peer']:.2f}×",
    ]


def head_cells(row: dict[str, Any]) -> list[str]:
    """Return the time of a test-time head, compared with scikit-learn."""
    return [
        row["name"],
        f"{1000 * row['seconds']:.0f} ms",
        f"{row['sklearn_seconds']:.1f} s",
        f"{row['ratio']:.0f}×",
        f"{100 * row['same_predictions']:.2f} %",
    ]


def flat_cells(row: dict[str, Any]) -> list[str]:
    """Return the memory for a number of inner steps."""
    return [row["mode"], str(row["steps"]), f"{row['peak MiB']:.0f} MiB", f"{row['ratio']:.2f}×"]


def throughput_cells(row: dict[str, Any]) -> list[str]:
    """Return the number of images per second in training."""
    return [str(row["batch"]), row["path"], f"{row['images_per_second']:,.0f}", f"{row['share_of_matrix_rate']:.0%}"]


def analytic_cells(row: dict[str, Any]) -> list[str]:
    """Return the time of an analytic kernel, compared with neural-tangents or, on a GPU, with the CPU."""
    seconds = row["seconds"], row.get("neural_tangents_seconds") or row["cpu_seconds"]
    return [row["name"], *(f"{1000 * value:.3g} ms" for value in seconds), f"{row['ratio']:.1f}×"]


def empirical_cells(row: dict[str, Any]) -> list[str]:
    """Return the time and the memory of an empirical kernel, compared with `torch.func`."""
    sizes = [f"{row[key]:.0f} MiB" for key in ("mib", "reference_mib")]
    times = [row["seconds"], row["reference_seconds"], *row.get("huge_pages_seconds", ())]
    ours, reference, *huge_pages = (f"{value:.2f} s" if value >= 1 else f"{1000 * value:.3g} ms" for value in times)
    ratios = [f"{row[key]:.1f}×" for key in ("time_ratio", "memory_ratio")]
    return [row["net"], ours, reference, ratios[0], " to ".join(huge_pages), *sizes, ratios[1]]


def experiment_table(name: str) -> str:
    """Return the table of our numbers and the published ones.

    If a result has more than `MAX_ROWS` rows, the table contains only rows with a published number or a verdict.
    """
    result = load_result(name)
    compared = [row for row in result["rows"] if row["agrees"] is not None or row["published"] is not None]
    shown = compared if len(result["rows"]) > MAX_ROWS and compared else result["rows"]
    rows = [
        [
            row["name"],
            row["metric"],
            "" if row["published"] is None else f"{row['published']:.4g}",
            f"{row['ours']:.4g}" + ("" if row["ci95"] is None else f" ± {row['ci95']:.2g}"),
            {True: "yes", False: "no", None: ""}[row["agrees"]],
            correct_plural(row["note"]),
        ]
        for row in shown
    ]
    table = markdown_table(["setting", "quantity", "published", "ours", "agrees", "notes"], rows)
    omitted = len(result["rows"]) - len(shown)
    omission = f" The other {omitted} numbers are in results/{name}.json." if omitted else ""
    return f"{table}\n\n{machine(result)}, seed {result['seed']}, {result['seconds'] / 60:.1f} minutes.{omission}"


def kernel_fewshot() -> str:
    """Return the table of kernels and networks as few-shot classifiers, by learner and training tasks."""
    result = load_result("kernel-fewshot")
    pattern = re.compile(r"(\w+, \d-shot), (.+), (support alone|fresh tasks|\d+ tasks(?:, ridge .+?)?)(, gain)?")
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["rows"]:
        if (match := pattern.fullmatch(row["name"])) and row["metric"].startswith("accuracy"):
            test, learner, training_tasks, gain = match.groups()
            numbers = cells.setdefault((learner, training_tasks), {})
            value = f"{row['ours']:{'+' if gain else ''}.1f} ± {row['ci95']:.1f}"
            numbers[test] = f"{numbers[test]} ({value})" if gain else value
    tests = list(dict.fromkeys(test for numbers in cells.values() for test in numbers))
    counts = [int(count[1]) for _, name in cells if (count := re.fullmatch(r"(\d+) tasks", name))]
    rows = [
        [learner, training_tasks, *(numbers.get(test, "") for test in tests)]
        for (learner, training_tasks), numbers in cells.items()
        if not training_tasks.endswith("tasks") or training_tasks in (f"{max(counts)} tasks", "fresh tasks")
    ]
    table = markdown_table(["learner", "trained on", *tests], rows)
    return f"{table}\n\n{machine(result)}, seed {result['seed']}; {result['settings']['test_tasks']} test tasks."


def batched_cells(row: dict[str, Any]) -> list[str]:
    """Return the time of predictions for many tasks together, compared with a loop over the tasks."""
    seconds = [f"{row[key]:.2f} s" for key in ("seconds", "loop_seconds")]
    return [row["name"], *seconds, f"{row['ratio']:.1f}×", f"{row['mebibytes']:.0f} MiB"]


def search() -> str:
    """Return one table per machine of the time per candidate of an architecture search, compared with other ways."""
    return "\n\n".join(_search_table(load_result(name)) for name in ("bench-search-cpu", "bench-search-h200"))


def _search_table(result: dict[str, Any]) -> str:
    alternatives = list(result["search"]["ratios"])
    headers = ["operators on an edge", "search", *(header for name in alternatives for header in (name, "ratio"))]

    def cells(label: str, row: dict[str, Any], format_time: Callable[[float], str]) -> list[str]:
        pairs = [(format_time(row["seconds"][name]), f"{row['ratios'][name]:.1f}×") for name in alternatives]
        return [label, format_time(row["seconds"]["search"]), *(cell for pair in pairs for cell in pair)]

    rows = [cells(str(row["operators"]), row, lambda seconds: f"{1000 * seconds:.0f} ms") for row in result["rows"]]
    rows.append(cells("a whole search", result["search"], lambda seconds: f"{seconds / 60:.1f} min"))
    settings = result["settings"]
    network = f"{settings['cells']} cells, {settings['channels']} channels, images of {settings['size']} pixels"
    return f"{machine(result)}; {network}:\n\n{markdown_table(headers, rows)}"


def fuzz() -> str:
    """Return the table of the outcomes for damaged and hostile files, by reader."""
    result = load_result("fuzz")
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
    headers = ["reader", "inputs", "rejected", "read, unchanged", "read, changed", "failures", "peak memory"]
    return f"{markdown_table(headers, rows)}\n\n{machine(result)}, seed {result['seed']}."


TABLES: dict[str, Callable[[], str]] = {
    "taxonomy": taxonomy,
    "solvers": solver_table,
    "outer-gradients": outer_rule_table,
    "test-heads": head_table,
    "training-defaults": training_defaults,
    "glyphs": glyph_table("glyphs"),
    "builtin-models": builtin_models,
    "demo": glyph_table("demo/glyphs"),
    "maml": benchmark_tables(
        ["bench-maml-cpu", "bench-maml-h200"],
        ["library", "images", "tasks", "time per meta-step", "relative speed", "peak memory", "relative memory"],
        library_cells,
    ),
    "heads": benchmark_tables(
        ["bench-heads-cpu", "bench-heads-h200"],
        ["head", "ours, 2000 tasks", "scikit-learn in a loop", "ratio", "equal predictions"],
        head_cells,
    ),
    "flat": benchmark_tables(
        ["bench-flat-cpu"], ["mode", "inner steps", "peak memory", "relative to 2 steps"], flat_cells
    ),
    "analytic": benchmark_tables(
        ["bench-ntk-analytic-cpu"], ["points", "ours", "neural-tangents", "ratio"], analytic_cells
    ),
    "analytic-gpu": benchmark_tables(
        ["bench-ntk-analytic-h200"], ["points", "ours", "ours on 2 CPU cores", "ratio"], analytic_cells
    ),
    "empirical": benchmark_tables(
        ["bench-ntk-empirical-cpu", "bench-ntk-empirical-h200"],
        ["network", "ours", "torch.func", "ratio", "torch.func, huge pages", "memory", "torch.func", "ratio"],
        empirical_cells,
    ),
    "kernel-fewshot": kernel_fewshot,
    "batched": benchmark_tables(
        ["bench-kernel-predict-cpu"], ["learner", "together", "in a loop", "ratio", "memory, together"], batched_cells
    ),
    "search": search,
    "fuzz": fuzz,
    "resnet12": benchmark_tables(
        ["bench-resnet12-h200"],
        ["batch size", "kernels", "images per second", "relative to matrix product"],
        throughput_cells,
    ),
    **{f"api-{name.rpartition('.')[2]}": api_table(name) for name in PACKAGES},
}


def replace_tables(text: str) -> str:
    """Return a page with newly generated tables."""

    def generate(match: re.Match[str]) -> str:
        name = match[2]
        return f"{match[1]}\n\n{TABLES[name]() if name in TABLES else experiment_table(name)}\n\n<!-- end -->"

    return re.sub(r"(<!-- table ([\w-]+) -->).*?<!-- end -->", generate, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """Return the pages that can contain tables."""
    cards = sorted((ROOT / "src").rglob("README.md"))  # of the built-in models
    return [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")), *cards]


if __name__ == "__main__":
    for page in pages():
        page.write_text(replace_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
