"""Fills the tables of docs/performance.md and docs/hardening.md from benchmarks/results/*.json.

    .venv/bin/python scripts/performance_page.py            write the tables
    .venv/bin/python scripts/performance_page.py --check    fail if a page differs

A figure without a result is left out.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
BEGIN, END = "<!-- figures -->\n", "<!-- /figures -->\n"


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    what: str
    file: str
    """Without `.json`; measured by the script of the same name."""
    key: str
    """Keys from the outermost to the innermost, separated by dots."""
    goal: str
    form: str = "{:.2f}"


FIGURES = (
    Figure("sampler CPU per model call, ms", "turn_cost", "sampler_ms", "≤ 3"),
    Figure("mongod CPU per model call, ms", "turn_cost", "mongod_ms", "≤ 2"),
    Figure(
        "tokens/s of a sampler relative to the bare engine", "rollout", "throughput_ratio", "≥ 0.95"
    ),
    *(
        Figure(
            f"rollouts/s of `--env {kind}:` relative to its own loop",
            "environments",
            f"{kind}.ratio",
            "≥ 0.95",
        )
        for kind in ("reasoning_gym", "textarena", "verifiers", "harbor")
    ),
    Figure("claims/s relative to a bare PyMongo loop", "store", "claims_ratio", "≥ 0.9"),
    Figure("turn writes/s relative to a bare PyMongo loop", "store", "turn_writes_ratio", "≥ 0.9"),
    Figure("bytes per token, 200 turns", "store", "bytes_per_token_200_turns", "≤ 16", "{:.1f}"),
    Figure("trainer reads/s relative to a bare cursor", "store", "reads_ratio", "1"),
    Figure(
        "engine speed relative to batched `generate`",
        "engine",
        "burst.engine_over.static_generate",
        "≥ 2",
    ),
    Figure(
        "engine speed relative to transformers' continuous batching",
        "engine",
        "burst.engine_over.continuous_batching",
        "≥ 3",
    ),
    Figure(
        "demo steps with merging, speed relative to separate turns",
        "replay",
        "speedup.tree",
        "",
        "{:.1f}",
    ),
    *(
        Figure(
            f"token trees of {kind} layers relative to their bound, branching",
            "tree",
            f"workloads.branching/{name}.share_of_bound",
            "≥ 0.85",
        )
        for name, kind in (
            ("hybrid", "Gated DeltaNet"),
            ("windowed", "windowed"),
            ("vision", "vision"),
        )
    ),
    Figure(
        "memory of a step on a path of 131,072 tokens, tiny hybrid, MiB",
        "long_path",
        "hybrid.131072.peak_mib",
        "",
        "{:.0f}",
    ),
    Figure("publishing time by disk relative to its bound", "weight_sync", "ratio", "≤ 1.2"),
    Figure(
        "publishing time by broadcast relative to its bound",
        "weight_sync",
        "broadcast_ratio",
        "≤ 1.2",
    ),
    Figure(
        "publishing time of dense models relative to its bound",
        "weight_sync",
        "dense_ratio",
        "≤ 1.2",
    ),
    Figure(
        "bytes of a delta relative to all bytes, learning rate 1e-6",
        "weight_sync",
        "delta.experts.rates.1.bytes_ratio",
        "",
        "{:.3f}",
    ),
    Figure("wall time to reward 0.8 relative to TRL", "time_to_reward", "wall_ratio", "≤ 0.5"),
    Figure("error of planned memory", "plan", "largest_error", "≤ 10 %", "{:.1%}"),
    Figure("error of planned memory, H200", "plan_cuda", "largest_error", "≤ 10 %", "{:.1%}"),
    Figure(
        "share of the H200's peak, 4 billion parameters, 16,384 tokens",
        "tree_cuda",
        "mfu.qwen3-4b/16384.tree.mfu",
        "",
        "{:.0%}",
    ),
    Figure(
        "the same with `--torch_compile true`",
        "tree_cuda",
        "mfu.qwen3-4b/16384.tree_compiled.mfu",
        "",
        "{:.0%}",
    ),
    Figure(
        "trainer speed relative to the measured GEMM peak, minimum",
        "trainer",
        "least_share",
        "≥ 0.6",
    ),
    Figure("idle share of the trainer, 256 servers", "scale_sim", "idle_share", "", "{:.1%}"),
    Figure(
        "computed against simulated rollouts/s, 8 to 32 GPUs, largest error",
        "scale_sim",
        "sizes.largest_error",
        "",
        "{:.1%}",
    ),
    Figure(
        "measured over predicted turns/s of one sampler",
        "scale_sim",
        "point.measured_over_predicted",
        "",
    ),
    Figure("first answer of a page at 1,000,000 turns, s", "ui", "first_answer_seconds_max", "≤ 1"),
    Figure("search at 1,000,000 turns, s", "ui", "search_seconds_max", "≤ 0.3"),
    Figure(
        "steps/s with an open inspector page relative to none",
        "ui",
        "step_rate_ratio",
        "≥ 0.98",
    ),
)


def figures() -> Iterator[str]:
    """Yield the lines of the table of docs/performance.md."""
    yield "| figure | measured | goal | source |\n|---|---|---|---|\n"
    for figure in FIGURES:
        value = _figure(_result(figure.file), figure.key)
        if value is not None:
            source = f"`{figure.file}.json`: `{figure.key}`"
            yield f"| {figure.what} | {figure.form.format(value)} | {figure.goal} | {source} |\n"


def attacks() -> Iterator[str]:
    """Yield the tables of docs/hardening.md, one for each group of lines."""
    found = _result("hardening") or {"lines": [], "parts": {}}
    values = {**found["parts"], "growth": _result("growth")}
    group = None
    for line in found["lines"]:
        cells = [_with_figures(line[name], values) for name in ("tried", "before", "after", "goal")]
        if None in cells:
            continue
        if line["group"] != group:
            yield f"## {line['group']}\n\n" if group is None else f"\n## {line['group']}\n\n"
            yield "| | what is tried | before | after | goal | test |\n|---|---|---|---|---|---|\n"
            group = line["group"]
        tests = ", ".join(f"`{name}`" for name in line["tests"])
        yield f"| {line['id']} | {' | '.join(map(str, cells))} | {tests} |\n"


PAGES: dict[str, Callable[[], Iterator[str]]] = {
    "docs/performance.md": figures,
    "docs/hardening.md": attacks,
}
_PLACEHOLDER = re.compile(r"\{([\w.-]+)(?::([^{}]*))?\}")


def _with_figures(text: str, values: dict[str, Any]) -> str | None:
    """Return a text with its figures, such as `{run.seconds:.1f}`; None where one is missing."""
    found = {match[1]: _figure(values, match[1]) for match in _PLACEHOLDER.finditer(text)}
    if None in found.values():
        return None
    return _PLACEHOLDER.sub(lambda match: format(found[match[1]], match[2] or ""), text)


def _result(name: str) -> Any:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _figure(value: Any, key: str) -> Any:
    for name in key.split("."):
        if isinstance(value, list):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def filled(name: str) -> str:
    """Return a page with the current tables."""
    before, _, rest = (ROOT / name).read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + "".join(PAGES[name]()) + "\n" + END + rest.partition(END)[2]


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args().check
    wrong = [name for name in PAGES if (ROOT / name).read_text(encoding="utf-8") != filled(name)]
    for name in wrong:
        if is_check:
            print(f"{name} differs from the results: run scripts/performance_page.py")
        else:
            (ROOT / name).write_text(filled(name), encoding="utf-8")
    return 1 if is_check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
