"""Forward and backward passes on the trees that agents make, merged and packed.

    python benchmarks/shapes.py --out benchmarks/results/shapes_cuda.json   # a GPU
    python benchmarks/shapes.py --device cpu --only tiny                    # the same, rehearsed

`merged` is the default of the flags: token trees, the device's attention, the compiler where it pays.
`packed` are the same turns, unmerged, in rows of up to `--max_tokens` tokens with variable-length flash
attention, through the layers of transformers; LM head and loss are those of `merged`, and the layers
are compiled alike. Both train on the same target tokens. Further ways differ from `merged` by their
attention, by leaving the compiler out, or by merging within records only (`apart`).

Every model runs in a process of its own, and every row is written as soon as it is measured. Seconds
are the fastest of `--repeats` passes after two that warm up. `mfu`: floating-point operations of the
merged work over the device's peak; `busy`: the share of the time in which the GPU computes, by the
profiler, and `kernels`: what it computes.
"""

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from transformers.modeling_layers import GradientCheckpointingLayer
from tree_row import SHAPES, Trainer, make_model
from tree_workloads import LARGE, Workload, make_groups, of_tree_size

from agentrl.data import StepBatch, build_step
from agentrl.data.rows import Merge
from agentrl.models.attention.attention_registry import implementation_of, set_attention
from agentrl.models.compilation import compile_policy
from agentrl.models.flops import FlopCount, peak_tflops
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel

HERE = Path(__file__).parent
MAX_TOKENS = 65536
SHAPES["smollm2-135m"] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
WORKLOADS = {
    # The first run of a pretrained model on a GPU: 34 groups of short branches, three turns each.
    "shop": Workload(34, 8, 340, 3, 7, 6),
    "agents": Workload(32, 8, 420, 3, 30, 30),
    "star": Workload(1, 8, 5500, 1, 1400, 1),
    "conversations": Workload(4, 1, 1, 1, 16384, 1),
    # Where merging has the least to win: long answers that share a short prompt.
    "answers": Workload(2, 4, 512, 1, 12288, 1),
    "tiny": Workload(2, 4, 40, 3, 8, 8),
}
LONG = 131072


@dataclass(frozen=True)
class Way:
    """How a row is computed."""

    merge: Merge
    attention: str
    compiled: bool


WAYS = {
    "merged": Way("tree", "auto", compiled=True),
    "packed": Way("none", "varlen", compiled=True),
    "merged_eager": Way("tree", "auto", compiled=False),
    "packed_eager": Way("none", "varlen", compiled=False),
    "apart": Way("linear", "auto", compiled=True),
    "flex": Way("tree", "flex", compiled=True),
    "varlen": Way("tree", "varlen", compiled=True),
    "sdpa": Way("tree", "sdpa", compiled=True),
}


def workload_of(name: str) -> Workload:
    """Return a workload by name."""
    return of_tree_size(LARGE["branching"], LONG) if name == "long" else WORKLOADS[name]


def step_of(name: str, merge: Merge) -> StepBatch:
    """Return a workload's step."""
    longest = LONG + 4096 if name == "long" else MAX_TOKENS
    groups = make_groups(workload_of(name))
    return build_step(groups, policy_version=0, token_budget=longest, merge=merge)


class Measured:
    """A model whose passes are measured in several ways."""

    def __init__(self, model: str, device: str, repeats: int) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self._model = make_model(model)
        self._device = torch.device(device)
        self._repeats = repeats

    def rows(
        self, workloads: Sequence[str], way: Way, *, checkpointing: bool
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the figures of workloads, with kernels that are compiled once."""
        policy = self._policy(way, checkpointing)
        for workload in workloads:
            try:
                found = self._row(policy, workload, way)
            except torch.OutOfMemoryError:
                found = {"failed": "out of memory"}
            yield workload, found | {"gradient_checkpointing": checkpointing}
            policy.zero_grad(set_to_none=True)
            gc.collect()
            torch.cuda.empty_cache()

    def _row(self, policy: PolicyModel, workload: str, way: Way) -> dict[str, Any]:
        trainer = Trainer(policy, self._device.type)
        batches = step_of(workload, way.merge).micro_batches[0]
        first = self._seconds(trainer, batches)
        self._seconds(trainer, batches)
        self._reset_peak()
        seconds = min(self._seconds(trainer, batches) for _ in range(self._repeats))
        merged = step_of(workload, "tree").micro_batches[0]
        work = sum(FlopCount.of(policy).row(batch.row) for batch in merged)
        peak = peak_tflops(self._device)
        return {
            "tokens": sum(batch.row.num_tokens for batch in batches),
            "micro_batches": len(batches),
            "seconds": round(seconds, 4),
            "first_seconds": round(first, 2),
            "mfu": None if peak is None else round(work / seconds / peak / 1e12, 4),
            **({} if self._device.type == "cpu" else self._profile(trainer, batches)),
        }

    def _policy(self, way: Way, checkpointing: bool) -> PolicyModel:
        torch.compiler.reset()
        set_attention(self._model, implementation_of(way.attention))
        for module in self._model.modules():
            module.__dict__.pop("forward", None)  # compiled
            if isinstance(module, GradientCheckpointingLayer):
                module.gradient_checkpointing = False
        policy = wrap_policy(self._model, gradient_checkpointing=checkpointing)
        policy.zero_grad(set_to_none=True)
        if way.compiled:
            compile_policy(policy, self._device)
        return policy

    def _seconds(self, trainer: Trainer, batches: Any) -> float:
        self._wait()
        started = time.perf_counter()
        trainer.accumulate(batches)
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _profile(self, trainer: Trainer, batches: Any) -> dict[str, Any]:
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
        with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
            self._wait()
            started = time.perf_counter()
            trainer.accumulate(batches)
            self._wait()
            wall = time.perf_counter() - started
        kernels: dict[str, list[float]] = {}
        for event in recorded.events():
            if event.device_type.name == "CUDA" and not event.is_user_annotation:
                kernels.setdefault(event.name[:90], []).append(event.self_device_time_total / 1e6)
        largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:12]
        return {
            "busy": round(sum(map(sum, kernels.values())) / wall, 3),
            "num_kernels": sum(map(len, kernels.values())),
            "peak_gib": round(peak_gib, 2),
            "kernels": {name: round(sum(times), 4) for name, times in largest},
        }


def measure(arguments: argparse.Namespace) -> None:
    """Measure the ways of one model; print a JSON line a row."""
    measured = Measured(arguments.model, arguments.device, arguments.repeats)
    for name in arguments.ways:
        way = WAYS[name]
        for workload, found in measured.rows(
            arguments.only, way, checkpointing=arguments.checkpointing
        ):
            print(json.dumps([workload, name, found]), flush=True)


def main() -> None:
    """Measure the models, each in a process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=HERE / "results/shapes_cuda.json")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m", "qwen3-0.6b", "qwen3-4b"])
    parser.add_argument(
        "--only", nargs="+", default=["shop", "agents", "star", "conversations", "answers", "long"]
    )
    parser.add_argument("--ways", nargs="+", default=["merged", "packed"], choices=WAYS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers")
    parser.add_argument("--model", help="measure in this process")
    arguments = parser.parse_args()
    if arguments.model:
        measure(arguments)
        return
    result = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    result |= {
        "machine": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    rows = result.setdefault("rows", {})
    for model in arguments.models:
        command = [sys.executable, __file__, *sys.argv[1:], "--model", model]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                workload, way, found = json.loads(line)
                rows.setdefault(f"{model}/{workload}", {})[way] = found
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")
                print(model, workload, way, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
