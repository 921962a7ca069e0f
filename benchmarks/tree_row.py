"""One row of `benchmarks/tree.py`: a model, a step, its time and its peak of memory, as JSON."""

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from tree_workloads import VOCABULARY, Workload, make_groups, single_row

from agentrl.config.sections import AlgorithmSection, TrainerSection
from agentrl.data import MicroBatch, StepBatch, build_step
from agentrl.data.tree import Merge
from agentrl.distributed import clip_gradients
from agentrl.models.attention.attention_registry import implementation_of
from agentrl.models.flops import FlopCount, peak_tflops
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner.optimizer import make_optimizer
from agentrl.trainer.learner.passes import forward_backward

UNBOUNDED = 10**9
HEAD_CHUNK = 2048
SHAPES: dict[str, dict[str, Any]] = {
    "demo": {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    # No layers and few channels beside many words: what is left is the LM head and the loss.
    "head": {
        "vocab_size": 8192,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 0,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "qwen3-4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}


Kind = Literal["none", "linear", "tree", "tree_chunked", "tree_varlen", "head", "trl"]


@dataclass(frozen=True)
class Row:
    """What one process measures."""

    kind: Kind
    """See `benchmarks/tree.py`; `head`: just LM head and loss."""
    shape: str
    workload: Workload
    token_budget: int
    device: str
    repeats: int

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Row":
        """Return the row that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields["workload"])})

    def step(self, token_budget: int | None = None) -> StepBatch:
        """Return the step as this row packs it."""
        merge: Merge = "tree"
        if self.kind in ("none", "linear"):
            merge = self.kind
        groups = make_groups(self.workload)
        if token_budget is None:
            token_budget = self.token_budget
            if self.kind == "tree_chunked":
                longest = max(len(turn.path) for group in groups for turn in group.turns)
                token_budget = min(token_budget, -(-longest // 2))
        return build_step(groups, policy_version=0, token_budget=token_budget, merge=merge)


def make_policy(row: Row) -> PolicyModel:
    """Return a model with random float32 weights; CUDA computes in bfloat16 and recomputes."""
    torch.manual_seed(0)
    is_cuda = row.device == "cuda"
    attention = implementation_of("flex" if is_cuda else "sdpa")
    config = Qwen3Config(
        **SHAPES[row.shape],
        max_position_embeddings=2**18,
    )
    config._attn_implementation = (
        implementation_of("varlen") if row.kind == "tree_varlen" else attention
    )
    with torch.device(row.device):
        model = Qwen3ForCausalLM(config)
    return wrap_policy(model, gradient_checkpointing=is_cuda)


def work_of(row: Row) -> dict[str, float]:
    """Return the floating-point operations of separate turns, linear merges and whole trees."""
    with torch.device("meta"):
        flops = FlopCount.of(PolicyModel(Qwen3ForCausalLM(Qwen3Config(**SHAPES[row.shape]))))
    return {
        kind: sum(
            flops.row(batch.row)
            for batch in replace(row, kind=kind).step(UNBOUNDED).micro_batches[0]
        )
        for kind in ("none", "linear", "tree")
    }


class Memory:
    """Peak of memory in MiB from its making on."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        gc.collect()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        self._before = self._now()

    def peak(self) -> float:
        """Return the peak: allocated on the GPU, growth of the resident set on CPU."""
        if self._is_cuda:
            return round(torch.cuda.max_memory_allocated() / 2**20, 1)
        return round((_resident("VmHWM") - self._before) / 1024, 1)

    def _now(self) -> float:
        return 0.0 if self._is_cuda else _resident("VmRSS")


def _resident(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(field)))


def step_seconds(
    device: str, accumulate: Callable[[], None], update: Callable[[], None]
) -> tuple[float, float]:
    """Run a step; return the seconds of forward and backward, and of clipping and AdamW."""

    def now() -> float:
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    accumulate()
    accumulated = now()
    update()
    return accumulated - started, now() - accumulated


def quickest(runs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the seconds of the fastest run, and those of all."""
    fastest = min(runs)
    return {
        "forward_backward": round(fastest[0], 4),
        "update": round(fastest[1], 4),
        "all_runs": [round(sum(run), 4) for run in runs],
    }


class Trainer:
    """What a learner does in a step, with a clock at hand."""

    def __init__(self, policy: PolicyModel, device: str) -> None:
        self._policy = policy
        self._device = device
        is_cuda = device == "cuda"
        self._autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=is_cuda)
        self._optimizer = make_optimizer(policy.parameters(), TrainerSection())

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Make a step; return its seconds as `step_seconds` does."""
        return step_seconds(self._device, lambda: self._accumulate(micro_batches), self._update)

    def _accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        for batch in micro_batches:
            forward_backward(
                self._policy,
                batch,
                AlgorithmSection(),
                chunk_size=HEAD_CHUNK,
                autocast=self._autocast,
            )

    def _update(self) -> None:
        clip_gradients(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def measure(row: Row) -> dict[str, Any]:
    """Return the figures of a row."""
    policy = make_policy(row)
    trainer = Trainer(policy, row.device)
    # Libraries are loaded and kernels compiled before anything counts.
    trainer.step(
        build_step(make_groups(single_row(256)), policy_version=0, token_budget=256).micro_batches[
            0
        ]
    )
    step = row.step()
    memory = Memory(row.device)
    trainer.step(step.micro_batches[0])
    runs = [trainer.step(step.micro_batches[0]) for _ in range(row.repeats)]
    seconds = sum(min(runs))
    flops = FlopCount.of(policy)
    work = sum(flops.row(batch.row) for batch in step.micro_batches[0])
    peak = peak_tflops(torch.device(row.device))
    num_tokens = step.stats.tokens_packed
    return {
        "tokens": num_tokens,
        "loss_terms": step.stats.num_targets,
        "micro_batches": len(step.micro_batches[0]),
        "passes": sum(batch.num_chunks for batch in step.micro_batches[0]),
        "seconds": quickest(runs),
        "tokens_per_second": round(num_tokens / seconds),
        "tflops": round(work / seconds / 1e12, 4),
        **({} if peak is None else mfu(flops, step, seconds, peak)),
        "memory": {
            "peak": memory.peak(),
            "weights": round(
                sum(p.numel() * p.element_size() for p in policy.parameters()) / 2**20, 1
            ),
        },
    }


def mfu(flops: FlopCount, step: StepBatch, seconds: float, peak: float) -> dict[str, float]:
    """Return the share of the device's peak, by two ways of counting attention.

    `mfu` counts the pairs that see each other. Some projects count every token as if it saw its
    whole row, twice of that where the row is one conversation; `mfu_square` is for them.
    """
    rows = [batch.row for batch in step.micro_batches[0]]
    work = sum(flops.row(row) for row in rows)
    unseen = sum(row.num_tokens**2 - float((row.positions + 1).sum()) for row in rows)
    return {
        "mfu": round(work / seconds / peak / 1e12, 4),
        "mfu_square": round((work + flops.per_pair * unseen) / seconds / peak / 1e12, 4),
    }


def measure_head(row: Row) -> dict[str, Any]:
    """Return the peak of memory of LM head and loss: a model without layers."""
    policy = make_policy(row)
    (batch,) = row.step().micro_batches[0]
    memory = Memory(row.device)
    trainer = Trainer(policy, row.device)
    seconds, _ = trainer.step([batch])
    num_tokens, vocabulary = batch.row.num_tokens, SHAPES["head"]["vocab_size"]
    return {
        "tokens": num_tokens,
        "seconds": round(seconds, 3),
        "memory": {"peak": memory.peak(), "logits_if_whole": num_tokens * vocabulary * 4 // 2**20},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = Row.from_json(sys.argv[1])
    print(json.dumps(measure_head(asked) if asked.kind == "head" else measure(asked)))
