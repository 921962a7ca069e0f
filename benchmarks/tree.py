"""Forward and backward time of one step: a row a turn, rows merged in a record, token trees.

    python benchmarks/tree.py --out benchmarks/results/tree.json

All three train on the same loss terms with the same gradient. Runs alternate between them and the
fastest of each counts. The clock is the process's CPU time with one thread, which on an idle
machine is wall time and on a shared one leaves the neighbours out. `bound` is the ratio of
floating-point work (parameters, attention, LM head); `share_of_bound` is the speed-up over it.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.algorithms.losses import policy_loss, weighted_sum
from agentrl.data.batch import StepBatch, build_step
from agentrl.data.select import SelectedGroup
from agentrl.data.tokens import TurnTokens
from agentrl.data.tree import Merge
from agentrl.models.attention import TREE_ATTENTION
from agentrl.models.load import wrap_policy
from agentrl.models.policy import PolicyModel, term_logprobs

VOCABULARY = 640
MERGES: tuple[Merge, ...] = ("none", "linear", "tree")


@dataclass(frozen=True)
class Workload:
    """Shape of a step."""

    num_groups: int
    num_records: int
    prompt_tokens: int
    num_turns: int
    sampled_tokens: int
    tool_tokens: int
    strip_thinking: bool = False
    """Whether a later prompt leaves out the first half of what a turn sampled."""


WORKLOADS = {
    # The demo: eight tries that share a system prompt with tool schemas.
    "star": Workload(8, 8, 150, 3, 20, 20),
    # One long conversation: merging within a record is all there is.
    "chain": Workload(2, 1, 100, 20, 20, 20),
    # Thinking is cut from the history, so that every turn leaves a stub behind.
    "think_strip": Workload(2, 1, 100, 20, 20, 20, strip_thinking=True),
}


def main() -> None:
    """Measure all workloads and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/tree.json"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--token_budget", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    policy = demo_sized_policy()
    result = {
        "machine": {"cpu": platform.processor() or platform.machine(), "threads": 1},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "clock": "process CPU seconds, forward and backward, fastest run",
        "parameters": sum(parameter.numel() for parameter in policy.parameters()),
        "token_budget": arguments.token_budget,
        "repeats": arguments.repeats,
        "workloads": {
            name: measure(policy, workload, arguments.token_budget, arguments.repeats)
            for name, workload in WORKLOADS.items()
        },
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["workloads"], indent=2))


def demo_sized_policy() -> PolicyModel:
    """Return a random Qwen3 of the demo's shape."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        attn_implementation=TREE_ATTENTION,
    )
    return wrap_policy(Qwen3ForCausalLM(config))


def measure(
    policy: PolicyModel, workload: Workload, token_budget: int, repeats: int
) -> dict[str, object]:
    """Time the three ways of one workload."""
    groups = make_groups(workload)
    batches = {
        merge: build_step(groups, policy_version=0, token_budget=token_budget, merge=merge)
        for merge in MERGES
    }
    seconds = {merge: [run(policy, batches[merge]) for _ in range(1)] for merge in MERGES}
    for _ in range(repeats):
        for merge in MERGES:
            seconds[merge].append(run(policy, batches[merge]))
    best = {merge: min(seconds[merge][1:]) for merge in MERGES}
    work = {merge: flops(policy, batches[merge]) for merge in MERGES}
    bound = work["none"] / work["tree"]
    return {
        "shape": asdict(workload),
        "tokens": {merge: batches[merge].stats.tokens_packed for merge in MERGES},
        "loss_terms": batches["tree"].stats.num_terms,
        "seconds": {merge: round(best[merge], 4) for merge in MERGES},
        "speedup": {merge: round(best["none"] / best[merge], 3) for merge in MERGES},
        "bound": {merge: round(work["none"] / work[merge], 3) for merge in MERGES},
        "share_of_bound": round(best["none"] / best["tree"] / bound, 3),
    }


def run(policy: PolicyModel, batch: StepBatch) -> float:
    """Return the CPU seconds of one forward and backward pass over a step."""
    policy.zero_grad(set_to_none=True)
    start = time.process_time()
    for micro_batch in batch.micro_batches[0]:
        logprobs = term_logprobs(policy, micro_batch.row).logprobs
        terms = policy_loss(
            logprobs,
            torch.from_numpy(micro_batch.behavior_logprobs),
            torch.from_numpy(micro_batch.advantages),
        )
        weighted_sum(terms, torch.from_numpy(micro_batch.weights)).backward()
    return time.process_time() - start


def flops(policy: PolicyModel, batch: StepBatch) -> float:
    """Return the multiply-add work of a step: 6 a parameter and token, 12 a head and pair."""
    config = policy.model.config
    head = config.vocab_size * config.hidden_size
    body = sum(parameter.numel() for parameter in policy.parameters()) - head
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    total = 0.0
    for micro_batch in batch.micro_batches[0]:
        row = micro_batch.row
        pairs = float((row.positions + 1).sum())
        head_rows = len(np.unique(row.sources))
        total += 6 * body * row.num_tokens + attention * pairs + 6 * head * head_rows
    return total


def make_groups(workload: Workload, seed: int = 0) -> list[SelectedGroup]:
    """Return random groups of the workload's shape with random advantages."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(workload.num_groups):
        prompt = rng.integers(0, VOCABULARY, workload.prompt_tokens)
        turns = [
            turn
            for record in range(workload.num_records)
            for turn in make_record(workload, f"{number}/{record}", prompt, rng)
        ]
        record_ids = tuple(f"{number}/{record}" for record in range(workload.num_records))
        groups.append(SelectedGroup(str(number), record_ids, (), tuple(turns)))
    return groups


def make_record(
    workload: Workload, record_id: str, prompt: np.ndarray, rng: np.random.Generator
) -> list[TurnTokens]:
    """Return the turns of one record."""
    turns, context = [], prompt
    advantage = float(rng.choice([-1.0, 1.0]))
    for index in range(workload.num_turns):
        output = rng.integers(0, VOCABULARY, workload.sampled_tokens)
        turns.append(
            TurnTokens(
                turn_id=f"{record_id}/{index}",
                record_id=record_id,
                chain=index if workload.strip_thinking else 0,
                full_ids=np.concatenate([context, output]).astype(np.int32),
                num_prompt_tokens=len(context),
                behavior_logprobs=np.full(len(output), -6.0, dtype=np.float32),
                versions=np.zeros(len(output), dtype=np.int32),
                advantage=advantage,
            )
        )
        kept = output[len(output) // 2 :] if workload.strip_thinking else output
        tool = rng.integers(0, VOCABULARY, workload.tool_tokens)
        context = np.concatenate([context, kept, tool])
    return turns


if __name__ == "__main__":
    main()
