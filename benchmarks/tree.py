"""Cost of a training step: one row per turn, rows merged within a record, token trees.

    python benchmarks/tree.py                                  # CPU, a model of the demo's size
    python benchmarks/tree.py --trl_python VENV/bin/python     # and TRL's trainer on the same turns
    python benchmarks/tree.py --device cuda --out tree_cuda.json --only mfu

Every row of the result comes from a separate process, which has its own memory peak. All rows of a
workload train on the same target tokens with the same gradient: forward, backward, clipping and
AdamW. Times are the fastest of `--repeats` runs after a warm-up. On CPU the clock is the process's
CPU time with one thread, which is wall time on an idle machine and excludes neighbors on a shared
one; on CUDA it is wall time.

- `none`, `linear`, `tree`: micro-batches within `--token_budget`, or four times that and one run on
  the long workloads, whose attention is most of the work.
- `tree_chunked`: as `tree`, but with half of the longest path as the budget, so that trees are
  computed in chunks. It does a quarter to a third more work. On CPU it needs least memory; on CUDA,
  where layers are recomputed, what passes between chunks is more than the inputs of all layers.
- `tree_compiled`: as `tree`, with `--torch_compile true`.
- `tree_varlen`, `tree_sdpa`: as `tree`, with variable-length attention or SDPA instead of
  FlexAttention (CUDA only).
- `packed`: the same turns, unmerged, in rows with variable-length attention, compiled; `shapes`
  compares it with `tree_compiled` on trees that agents make (CUDA only).
- `trl`: rows of whole conversations if TRL can mask what was not sampled, else one row per turn;
  see `benchmarks/tree_trl.py`.

`NAME/hybrid`, `NAME/windowed` and `NAME/vision` are the same steps with Gated DeltaNet, with windows and
with a picture in front of every prompt.

`bound` is the ratio of floating-point operations (parameters, attention, LM head) of separate turns
to those of the whole tree without repeated prefixes; `share_of_bound` is the speed-up of `tree`
(forward and backward) over it. `memory` is in MiB: on CPU the growth of the process's resident set
during the steps, on CUDA the peak allocation, of which `weights` are the weights. The result is
written after every row: an interrupted run loses nothing.
"""

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tree_row import SHAPES, Kind, Row, work_of
from tree_workloads import AGENTS, LARGE, LONG, SMALL, Workload, of_tree_size, single_row

HERE = Path(__file__).parent
ROWS: tuple[Kind, ...] = ("none", "linear", "tree", "tree_chunked")
SECTIONS = ("workloads", "head", "mfu", "large_tree", "shapes")
ROW_SECONDS = 900
MFU: tuple[tuple[str, int, int, tuple[Kind, ...]], ...] = (
    ("qwen3-4b", 16384, 2, ("tree", "tree_compiled")),
    ("qwen3-0.6b", 16384, 2, ("tree", "tree_compiled", "tree_varlen", "tree_sdpa")),
    ("experts", 16384, 2, ("tree", "tree_compiled")),
    ("qwen3-0.6b", 65536, 1, ("tree_compiled", "tree_varlen")),
    ("qwen3-4b", 65536, 1, ("tree_compiled",)),
    # Last: without flash-linear-attention, a pass takes more than a minute.
    ("hybrid-4b", 16384, 2, ("tree",)),
)
"""Shape, tokens of a conversation, number of conversations, and ways to compute attention."""


@dataclass(frozen=True)
class Setting:
    """A place in the result and the row that fills it."""

    section: str
    name: str
    row: Row


def settings(device: str, token_budget: int, repeats: int, *, with_trl: bool) -> Iterator[Setting]:
    """Return all settings of a device."""
    if device == "cpu":
        kinds: tuple[Kind, ...] = (*ROWS, "trl") if with_trl else ROWS
        for name, workload in SMALL.items():
            for kind in kinds:
                row = Row(kind, "demo", workload, token_budget, device, repeats)
                yield Setting("workloads", name, row)
        yield from kind_settings(token_budget, repeats, kinds)
        for name, workload in LONG.items():
            for kind in kinds:
                if kind != "linear" or workload.extends_itself:  # otherwise equal to `none`
                    runs = min(repeats, 2)
                    row = Row(kind, "demo", workload, 4 * token_budget, device, runs)
                    yield Setting("workloads", name, row)
    else:
        yield from large_settings(repeats)
    for num_tokens in (4096, 16384, 65536):
        row = Row("head", "head", single_row(num_tokens), num_tokens, device, repeats)
        yield Setting("head", str(num_tokens), row)


def kind_settings(token_budget: int, repeats: int, kinds: Sequence[Kind]) -> Iterator[Setting]:
    """Return the steps of models with other kinds of layers."""
    for shape in ("hybrid", "windowed", "vision"):
        for name in ("star", "chain", "branching"):
            for kind in kinds:
                if kind != "trl" or shape != "vision":  # TRL's rows are of text
                    row = Row(kind, shape, SMALL[name], token_budget, "cpu", repeats)
                    yield Setting("workloads", f"{name}/{shape}", row)


def large_settings(repeats: int) -> Iterator[Setting]:
    """Return the settings for a GPU, the most important first."""
    for shape, num_tokens, num_rows, attentions in MFU:
        for kind in attentions:
            row = Row(
                kind, shape, single_row(num_tokens, num_rows), num_tokens, "cuda", repeats, True
            )
            yield Setting("mfu", f"{shape}/{num_tokens}", row)
    huge = of_tree_size(LARGE["branching"], 131072)
    yield from agent_settings(repeats)
    budgets: dict[Kind, int] = {"tree": 131072 + 4096, "tree_chunked": 32768}
    for kind, budget in budgets.items():
        yield Setting(
            "large_tree", "qwen3-4b/131072", Row(kind, "qwen3-4b", huge, budget, "cuda", 1)
        )
    for shape in ("qwen3-0.6b", "qwen3-4b"):
        for num_tokens in (16384, 65536):
            for name, workload in LARGE.items():
                sized = of_tree_size(workload, num_tokens)
                # Separate turns of the largest setting are more than half a million tokens.
                runs = repeats if num_tokens < 65536 else 1
                kinds: tuple[Kind, ...] = (*ROWS, "tree_varlen", "tree_sdpa")
                for kind in kinds:
                    row = Row(kind, shape, sized, num_tokens + 1024, "cuda", runs)
                    yield Setting("workloads", f"{name}/{shape}/{num_tokens}", row)


def agent_settings(repeats: int) -> Iterator[Setting]:
    """Return the trees that agents make, merged and packed."""
    for shape in ("smollm2-135m", "qwen3-0.6b", "qwen3-4b"):
        for name, workload in AGENTS.items():
            for kind in ("tree_compiled", "packed"):
                row = Row(kind, shape, workload, 65536, "cuda", repeats, True, shape == "qwen3-4b")
                yield Setting("shapes", f"{shape}/{name}", row)


def measure(row: Row, trl_python: str | None) -> dict[str, Any]:
    """Run a row in a separate process."""
    is_trl = row.kind == "trl"
    command = [trl_python if is_trl and trl_python else sys.executable]
    command += [str(HERE / ("tree_trl.py" if is_trl else "tree_row.py")), row.to_json()]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=ROW_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {ROW_SECONDS} s"}
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        return {"failed": lines[-1][:300]}
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def filed(result: dict[str, Any], setting: Setting, found: dict[str, Any]) -> None:
    """Store a row's figures and compute those that depend on several rows."""
    section = result.setdefault(setting.section, {})
    if setting.section != "workloads":
        entry = section.setdefault(setting.name, {})
        entry.update(found if setting.section == "head" else {setting.row.kind: found})
        return
    entry = section.setdefault(setting.name, {"shape": shape_of(setting.row.workload)})
    entry.setdefault("rows", {})[setting.row.kind] = found
    rows = entry["rows"]
    if any("failed" in rows.get(kind, {"failed": ""}) for kind in ("none", "tree")):
        return
    work = work_of(setting.row)
    seconds = {
        kind: row["seconds"]["forward_backward"] for kind, row in rows.items() if "seconds" in row
    }
    entry["speedup"] = {k: round(seconds["none"] / value, 3) for k, value in seconds.items()}
    entry["bound"] = {kind: round(work["none"] / value, 3) for kind, value in work.items()}
    entry["share_of_bound"] = round(
        seconds["none"] / seconds["tree"] / (work["none"] / work["tree"]), 3
    )


def shape_of(workload: Workload) -> dict[str, Any]:
    """Return the fields that differ from the defaults."""
    return {name: value for name, value in asdict(workload).items() if value}


def main() -> None:
    """Measure the requested settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results/tree.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--token_budget", type=int, default=4096, help="tokens per pass, on CPU")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--workloads", nargs="+", help="measure these again and keep the others")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="measure these models alone")
    parser.add_argument("--trl_python", help="Python interpreter with TRL installed")
    arguments = parser.parse_args()
    if arguments.workloads:
        arguments.only = ["workloads"]
    result: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else None,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "model": {name: dict(shape) for name, shape in SHAPES.items()},
        "repeats": arguments.repeats,
    }
    if arguments.out.exists():  # keep sections that are not measured in this run
        stored = json.loads(arguments.out.read_text())
        kept = [
            s for s in SECTIONS if s in stored and (arguments.shapes or s not in arguments.only)
        ]
        result |= {section: stored[section] for section in kept}
        if arguments.workloads:
            result["workloads"] = stored.get("workloads", {})
    with_trl = arguments.trl_python is not None
    for setting in settings(
        arguments.device, arguments.token_budget, arguments.repeats, with_trl=with_trl
    ):
        is_wanted = (not arguments.workloads or setting.name in arguments.workloads) and (
            not arguments.shapes or setting.row.shape in arguments.shapes
        )
        if is_wanted and setting.section in arguments.only:
            found = measure(setting.row, arguments.trl_python)
            filed(result, setting, found)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
            print(setting.section, setting.name, setting.row.kind, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
