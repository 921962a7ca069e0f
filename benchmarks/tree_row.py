"""One row of `benchmarks/tree.py`: a model, a step, its time and its peak of memory, as JSON."""

import gc
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile
from transformers import AutoConfig, PreTrainedModel
from tree_workloads import VOCABULARY, Workload, make_groups, single_row

from agentrl.config.sections import AlgorithmSection, TrainerSection
from agentrl.data import MicroBatch, SelectedGroup, StepBatch, build_step
from agentrl.data.rows import Merge
from agentrl.data.shown_images import ShownImage, expanded
from agentrl.data.tokens import TurnTokens
from agentrl.distributed import clip_gradients
from agentrl.models.attention.attention_registry import implementation_of, set_attention
from agentrl.models.compilation import compile_policy
from agentrl.models.flops import FlopCount, peak_tflops
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.models.vision.image_encoders import model_class
from agentrl.models.vision.image_reader import ImageReader
from agentrl.trainer.learner.optimizer import make_optimizer
from agentrl.trainer.learner.passes import forward_backward

UNBOUNDED = 10**9
HEAD_CHUNK = 2048
DEMO: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
IMAGE_TOKEN = VOCABULARY
IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 65536},
}
SHAPES: dict[str, dict[str, Any]] = {
    "demo": DEMO,
    # The demo's size with other kinds of layers: Gated DeltaNet, windows, and an image a prompt.
    "hybrid": {
        **DEMO,
        "model_type": "qwen3_5_text",
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
    "windowed": {
        **DEMO,
        "model_type": "olmo3",
        "sliding_window": 128,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "vision": {
        "model_type": "qwen3_vl",
        "text_config": {
            **DEMO,
            "vocab_size": VOCABULARY + 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN + 1,
        "vision_start_token_id": IMAGE_TOKEN + 2,
        "vision_end_token_id": IMAGE_TOKEN + 3,
        "tie_word_embeddings": True,
    },
    # No layers and few channels but a large vocabulary: only the LM head and the loss remain.
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
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "tie_word_embeddings": True,
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
    # Four layers of Qwen3-30B-A3B, and eight of a hybrid of 4 billion parameters.
    "experts": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "hybrid-4b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9216,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": True,
    },
}


Kind = Literal[
    "none",
    "linear",
    "tree",
    "tree_chunked",
    "tree_compiled",
    "tree_varlen",
    "tree_sdpa",
    "packed",
    "head",
    "trl",
]


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
    profiled: bool = False
    """Whether to report what the GPU does meanwhile."""
    recomputed: bool = True
    """Whether a GPU recomputes layers in the backward pass."""

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Row":
        """Return the row that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "workload": Workload(**fields["workload"])})

    def step(self, token_budget: int | None = None) -> StepBatch:
        """Return the step in this row's packing."""
        merges: dict[Kind, Merge] = {"none": "none", "linear": "linear", "packed": "none"}
        merge = merges.get(self.kind, "tree")
        groups = make_groups(self.workload)
        if self.shape == "vision":
            groups = with_image(groups)
        if token_budget is None:
            token_budget = self.token_budget
            if self.kind == "tree_chunked":
                longest = max(len(turn.path) for group in groups for turn in group.turns)
                token_budget = min(token_budget, -(-longest // 2))
        return build_step(groups, policy_version=0, token_budget=token_budget, merge=merge)


def make_model(shape: str) -> PreTrainedModel:
    """Return a random model of a shape."""
    values = {"model_type": "qwen3", **SHAPES[shape]}
    (values.get("text_config") or values)["max_position_embeddings"] = 2**18
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    model: PreTrainedModel = model_class(config).from_config(config)
    return model


def with_image(groups: Sequence[SelectedGroup]) -> list[SelectedGroup]:
    """Return groups whose prompts all start with one picture of 128 by 128 pixels."""
    reader = ImageReader(make_model("vision").config)
    picture = BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture, format="PNG")
    image = reader.shown(picture.getvalue(), IMAGE_PROCESSOR)
    return [
        replace(group, turns=tuple(_showing(turn, image) for turn in group.turns))
        for group in groups
    ]


def _showing(turn: TurnTokens, image: ShownImage) -> TurnTokens:
    placeholder = np.array([IMAGE_TOKEN], dtype=np.int32)
    ids, placed = expanded(np.concatenate([placeholder, turn.full_ids]), [(0, image)])
    num_added = len(ids) - len(turn.full_ids)
    num_prompt_tokens = turn.num_prompt_tokens + num_added
    return replace(turn, full_ids=ids, num_prompt_tokens=num_prompt_tokens, images=placed)


def make_policy(row: Row) -> PolicyModel:
    """Return a model with random float32 weights; CUDA computes in bfloat16 and recomputes."""
    torch.manual_seed(0)
    is_cuda = row.device == "cuda"
    attention = "flex" if is_cuda else "sdpa"
    if row.kind in ("tree_varlen", "tree_sdpa"):
        attention = row.kind.removeprefix("tree_")
    if row.kind == "packed":
        attention = "varlen"
    with torch.device(row.device):
        model = make_model(row.shape)
    set_attention(model, implementation_of(attention))
    policy = wrap_policy(model, gradient_checkpointing=is_cuda and row.recomputed)
    if row.kind in ("tree_compiled", "packed"):
        compile_policy(policy, torch.device(row.device))
    return policy


def work_of(row: Row) -> dict[str, float]:
    """Return the floating-point operations of separate turns, linear merges and whole trees."""
    with torch.device("meta"):
        flops = FlopCount.of(PolicyModel(make_model(row.shape)))
    return {
        kind: sum(
            flops.row(batch.row)
            for batch in replace(row, kind=kind).step(UNBOUNDED).micro_batches[0]
        )
        for kind in ("none", "linear", "tree")
    }


class Memory:
    """Peak of memory in MiB since its creation."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        gc.collect()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is reset
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
    """A learner's step, with timing."""

    def __init__(self, policy: PolicyModel, device: str) -> None:
        self._policy = policy
        self._device = device
        is_cuda = device == "cuda"
        self._autocast = torch.autocast(device, dtype=torch.bfloat16, enabled=is_cuda)
        self._optimizer = make_optimizer(policy.parameters(), TrainerSection(), policy.device)

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Run a step; return its seconds as `step_seconds` does."""
        return step_seconds(self._device, lambda: self.accumulate(micro_batches), self._update)

    def accumulate(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Add the gradients of all micro-batches."""
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
    # Warm-up: loads libraries and compiles kernels.
    trainer.step(
        build_step(make_groups(single_row(256)), policy_version=0, token_budget=256).micro_batches[
            0
        ]
    )
    step = row.step()
    memory = Memory(row.device)
    trainer.step(step.micro_batches[0])
    runs = [trainer.step(step.micro_batches[0]) for _ in range(row.repeats)]
    seconds, peak_mib = sum(min(runs)), memory.peak()
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
        **({"profile": profile(trainer, step)} if row.profiled else {}),
        "memory": {
            "peak": peak_mib,
            "weights": round(
                sum(p.numel() * p.element_size() for p in policy.parameters()) / 2**20, 1
            ),
        },
    }


def mfu(flops: FlopCount, step: StepBatch, seconds: float, peak: float) -> dict[str, float]:
    """Return the share of the device's peak, by two ways of counting attention.

    `mfu` counts the pairs that see each other. Some projects count every token as if it saw its
    whole row, which is twice as much if the row is one conversation; `mfu_square` follows them.
    """
    rows = [batch.row for batch in step.micro_batches[0]]
    work = sum(flops.row(row) for row in rows)
    unseen = sum(row.num_tokens**2 - float((row.positions + 1).sum()) for row in rows)
    return {
        "mfu": round(work / seconds / peak / 1e12, 4),
        "mfu_square": round((work + flops.per_pair * unseen) / seconds / peak / 1e12, 4),
    }


KERNELS = {
    "attention": re.compile("flex|flash|fmha|triton_tem", re.IGNORECASE),
    "products": re.compile("gemm|nvjet|cutlass|xmma|grouped|cublas", re.IGNORECASE),
    "copies": re.compile("copy|memset|memcpy|CatArray|fill|index|gather|scatter", re.IGNORECASE),
    "reductions": re.compile("reduce|softmax|norm", re.IGNORECASE),
    "elementwise": re.compile("elementwise", re.IGNORECASE),
}
"""Kind of work -> names of CUDA kernels; the first match counts."""


def profile(trainer: Trainer, step: StepBatch) -> dict[str, Any]:
    """Return what the GPU does in forward and backward passes.

    `busy` is the share of the time in which it computes; seconds are those by kind of work.
    """
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch_profile(activities=activities, acc_events=True) as recorded:
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.accumulate(step.micro_batches[0])
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    seconds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    num_kernels = 0
    for event in recorded.events():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            found = (kind for kind, names in KERNELS.items() if names.search(event.name))
            seconds[next(found, "other")] += event.self_device_time_total / 1e6
            kernels[event.name[:120]] += event.self_device_time_total / 1e6
            num_kernels += 1
    return {
        "busy": round(seconds.total() / wall, 3),
        "num_kernels": num_kernels,
        "seconds": {kind: round(value, 4) for kind, value in seconds.most_common()},
        "kernels": {name: round(value, 4) for name, value in kernels.most_common(12)},
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
