"""A conversation of 131,072 tokens with a branch, a hybrid and a full-attention model, on this machine.

    python benchmarks/long_path.py                       # 8k, 32k and 128k tokens
    python benchmarks/long_path.py --tokens 8192

Widths are tiny, with one layer of each kind: the benchmark measures length. A record of eight turns
that extend each other reaches `--tokens`; another record branches off at three quarters. Each
figure comes from a separate process with one thread:

- `peak_mib`: growth of the resident set during the step, in chunks of `--token_budget`;
- `seconds`: CPU time of its forward and backward pass, float32.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import product
from typing import Any

import numpy as np
import torch
from harness.results import keep, machine, parser, stored
from harness.tiny_families import FAMILIES, SHAPE, small_model
from transformers import AutoConfig
from tree_row import Memory

from agentrl.config.sections import AlgorithmSection
from agentrl.data import MicroBatch, SelectedGroup, build_step
from agentrl.data.tokens import TurnTokens
from agentrl.models.attention.attention_registry import TREE_ATTENTION, set_attention
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel
from agentrl.trainer.learner.passes import forward_backward

NUM_TURNS = 8
MODELS = {"hybrid": "qwen3_5_text", "full": "qwen3"}
TOKENS = (8192, 32768, 131072)


def conversation(num_tokens: int) -> SelectedGroup:
    """Return a record of turns up to `num_tokens`, and one turn of another that branches off."""
    rng = np.random.default_rng(0)
    vocabulary = SHAPE["vocab_size"]
    path = rng.integers(0, vocabulary, num_tokens + 1).astype(np.int32)
    ends = np.linspace(0, len(path), NUM_TURNS + 1).astype(int)[1:].tolist()
    turns = [
        _turn("long", number, path[:end], num_tokens // 32, 1.0) for number, end in enumerate(ends)
    ]
    left = path[: 3 * num_tokens // 4]
    added = rng.integers(0, vocabulary, num_tokens // 32).astype(np.int32)
    turns.append(_turn("branch", 0, np.concatenate([left, added]), num_tokens // 64, -1.0))
    return SelectedGroup("long", ("long", "branch"), (), tuple(turns))


def _turn(
    record_id: str, number: int, ids: np.ndarray, num_sampled: int, advantage: float
) -> TurnTokens:
    return TurnTokens(
        turn_id=f"{record_id}/{number}",
        record_id=record_id,
        chain=0,
        full_ids=ids,
        num_prompt_tokens=len(ids) - num_sampled,
        behavior_logprobs=np.full(num_sampled, -3.7, dtype=np.float32),
        versions=np.zeros(num_sampled, dtype=np.int32),
        advantage=advantage,
    )


def tiny_policy(family: str) -> PolicyModel:
    """Return a random model of a family with two heads, a layer of each kind."""
    model_type, own = FAMILIES[family]
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 2**18}
    model = small_model(AutoConfig.for_model(model_type, **{**SHAPE, **own, **heads}))
    model.to(dtype=torch.float32)  # type: ignore[call-arg]
    set_attention(model, TREE_ATTENTION)
    return wrap_policy(model)


def gradient(policy: PolicyModel, batches: tuple[MicroBatch, ...]) -> torch.Tensor:
    """Return the gradient of a step's micro-batches in one vector."""
    policy.zero_grad(set_to_none=True)
    plain = torch.autocast("cpu", enabled=False)
    smooth = AlgorithmSection(loss_calculator="REINFORCE", importance_weight_cap_ratio=1e12)
    for batch in batches:
        forward_backward(policy, batch, smooth, chunk_size=2048, autocast=plain)
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def measure(family: str, num_tokens: int, token_budget: int) -> dict[str, Any]:
    """Return the figures of a model and a length."""
    group = conversation(num_tokens)
    step = build_step([group], policy_version=0, token_budget=token_budget)
    policy = tiny_policy(family)
    gradient(
        policy, build_step([conversation(256)], policy_version=0, token_budget=64).micro_batches[0]
    )
    memory, started = Memory("cpu"), time.process_time()
    norm = float(gradient(policy, step.micro_batches[0]).norm())
    return {
        "tokens": step.stats.tokens_packed,
        "chunks": sum(batch.num_chunks for batch in step.micro_batches[0]),
        "loss_terms": step.stats.num_targets,
        "seconds": round(time.process_time() - started, 1),
        "peak_mib": memory.peak(),
        "gradient_norm": norm,
    }


def main() -> None:
    """Measure each model and length in a separate process."""
    flags = parser(__doc__, "long_path")
    flags.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    flags.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    flags.add_argument("--token_budget", type=int, default=4096)
    flags.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.here:
        torch.set_num_threads(1)
        (name,), (num_tokens,) = given.models, given.tokens
        print(json.dumps(measure(MODELS[name], num_tokens, given.token_budget)))
        return
    about = machine()
    for name, num_tokens in product(given.models, given.tokens):
        of_one = ["--here", "--models", name, "--tokens", str(num_tokens)]
        of_one += ["--token_budget", str(given.token_budget)]
        process = subprocess.run(
            [sys.executable, __file__, *of_one], stdout=subprocess.PIPE, text=True, check=True
        )
        figures = json.loads(process.stdout.splitlines()[-1])
        rows = {**stored(given.out).get(name, {}), str(num_tokens): figures}
        keep(given.out, {name: rows, "machine": about})


if __name__ == "__main__":
    main()
