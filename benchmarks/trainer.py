"""Compares the trainer's passes with the time of matrix products of the same shapes.

    python benchmarks/trainer.py

For a dense, an expert and a hybrid model of 50 to 60 million parameters: `forward_backward` of one
row of conversations of 2,048 tokens, all of them in the loss, with and without recomputation. The
bound is measured right before and right after, and the quicker one counts: every linear layer's
product and its two gradients, on matrices of the same shapes, and the products of attention at the
rate of one of its blocks, each for its share of visible pairs. Recomputation adds the forward
products once more. `share` is bound over time; softmax, norms, gates, routing, recurrences and the
loss are not in the bound, so 1 is out of reach.

`--tokens 4096,16384` sets the lengths of the rows, `--models` the models, `--recomputed` one of the
two ways (65,536 tokens without recomputation exceed the memory of a small machine), and `--compiled`
measures with `--torch_compile true`, too. Rows of the file that are not measured again are unchanged.
A pass is timed after a warm-up pass, which leaves the heap as in a trainer's later steps; of one over
up to 4,096 tokens, the quicker of two counts.
"""

import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from operator import itemgetter
from typing import Any

import torch
from harness.results import keep, machine, parser, stored
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch
from agentrl.models.attention.attention_registry import TREE_ATTENTION
from agentrl.models.compilation import compile_policy
from agentrl.models.flops import FlopCount
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.plugins.planner.rehearsal import filled_row
from agentrl.runtime.processes.memory import keep_freed_memory
from agentrl.trainer.learner.passes import forward_backward

CONVERSATION, CHUNK = 2048, 1024
_REPEATED_TOKENS = 4096
_BLOCK = 512
_SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {"num_hidden_layers": 10, "intermediate_size": 1920}),
    "expert": (
        "qwen3_moe",
        {
            "num_hidden_layers": 6,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
            "intermediate_size": 1024,
        },
    ),
    "hybrid": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 8,
            "intermediate_size": 1920,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 5,
            "linear_num_value_heads": 10,
        },
    ),
}


def make_policy(kind: str, *, recomputed: bool, compiled: bool) -> PolicyModel:
    """Return a random model."""
    family, sizes = MODELS[kind]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **_SHAPE, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=TREE_ATTENTION)
    policy = wrap_policy(model, gradient_checkpointing=recomputed)
    if compiled:
        compile_policy(policy, policy.device)
    return policy


def seconds_of(work: Callable[[], object], repeats: int = 2) -> float:
    """Return the fastest of some repetitions, after a warm-up."""
    found: list[float] = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found[1:])


def products(policy: PolicyModel, batch: MicroBatch) -> Counter[tuple[int, int, int]]:
    """Return the products of a forward pass: (rows, inputs, outputs) -> how many."""
    config: Any = policy.model.config
    found: Counter[tuple[int, int, int]] = Counter()
    num_tokens = batch.row.num_tokens
    head = policy.model.get_output_embeddings()
    for name, module in policy.model.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            found[num_tokens, module.in_features, module.out_features] += 1
        elif name.endswith("experts"):
            rows = num_tokens * config.num_experts_per_tok // config.num_experts
            for stack in module.parameters(recurse=False):
                found[rows, stack.shape[2], stack.shape[1]] += stack.shape[0]
    chunks = -(-batch.row.num_targets // CHUNK)
    found[CHUNK, config.hidden_size, config.vocab_size] += chunks
    return found


def bound(policy: PolicyModel, batch: MicroBatch, *, recomputed: bool) -> float:
    """Return the seconds of all matrix products of a forward and a backward pass."""
    total = 0.0
    head = policy.model.config.vocab_size
    for (rows, inputs, outputs), count in products(policy, batch).items():
        x, w, y = (
            torch.rand(*size) for size in ((rows, inputs), (inputs, outputs), (rows, outputs))
        )

        def forward(x: torch.Tensor = x, w: torch.Tensor = w) -> object:
            return x @ w

        def backward(
            x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y
        ) -> tuple[object, object]:
            return y @ w.T, x.T @ y

        # The head's chunks are recomputed in any case.
        again = recomputed or (outputs == head and batch.row.num_targets > CHUNK)
        total += count * ((2 if again else 1) * seconds_of(forward) + seconds_of(backward))
    config: Any = policy.model.config
    heads, size = config.num_attention_heads, config.head_dim
    q, k = torch.rand(heads, _BLOCK, size), torch.rand(heads, size, _BLOCK)
    rate = 2.0 * heads * _BLOCK * _BLOCK * size / seconds_of(lambda: q @ k, 8)
    pairs = float(batch.row.positions.sum()) + batch.row.num_tokens
    # 12 operations per pair, of which the forward pass has 4.
    operations: float = FlopCount.of(policy).per_pair * pairs * (4 / 3 if recomputed else 1)
    return float(total + operations / rate)


def measure(kind: str, num_tokens: int, *, recomputed: bool, compiled: bool) -> dict[str, Any]:
    """Measure one model at one length."""
    policy = make_policy(kind, recomputed=recomputed, compiled=compiled)
    batch = filled_row(num_tokens, CONVERSATION)
    autocast = torch.autocast("cpu", enabled=False)

    def passes(row: MicroBatch = batch) -> None:
        forward_backward(policy, row, AlgorithmSection(), chunk_size=CHUNK, autocast=autocast)
        policy.zero_grad()

    about = machine()
    least = bound(policy, batch, recomputed=recomputed)
    seconds = seconds_of(passes, 1 if num_tokens > _REPEATED_TOKENS else 2)
    least = min(least, bound(policy, batch, recomputed=recomputed))
    return {
        "model": kind,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "tokens": num_tokens,
        "recomputed": recomputed,
        "compiled": compiled,
        "seconds": round(seconds, 3),
        "bound_seconds": round(least, 3),
        "share": round(least / seconds, 3),
        "date": about["date"],
        "load_before": about["load_before"],
    }


def main() -> None:
    """Measure and write."""
    flags = parser(__doc__, "trainer")
    flags.add_argument("--tokens", default="4096")
    flags.add_argument("--models", default=",".join(MODELS))
    flags.add_argument("--recomputed", choices=("yes", "no"), help="one of the two ways alone")
    flags.add_argument("--compiled", action="store_true", help="both without and with compilation")
    given = flags.parse_args()
    ways = {"yes": (True,), "no": (False,), None: (False, True)}[given.recomputed]
    compilations = (False, True) if given.compiled else (False,)
    keep_freed_memory()
    torch.set_flush_denormal(True)
    about = {**machine(), "threads": torch.get_num_threads()}
    key = itemgetter("model", "tokens", "recomputed", "compiled")
    rows = {key(row): row for row in stored(given.out).get("share_of_gemm", ())}
    for num_tokens, kind, recomputed, compiled in product(
        map(int, given.tokens.split(",")), given.models.split(","), ways, compilations
    ):
        found = measure(kind, num_tokens, recomputed=recomputed, compiled=compiled)
        rows[key(found)] = found
        result = {
            "least_share": min(row["share"] for row in rows.values()),
            "share_of_gemm": [rows[row] for row in sorted(rows)],
            "conversation_tokens": CONVERSATION,
        }
        keep(given.out, {**result, "machine": about})


if __name__ == "__main__":
    main()
