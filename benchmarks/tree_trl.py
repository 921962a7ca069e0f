"""The `trl` row of `benchmarks/tree.py`: TRL's GRPO trainer on the same turns, as JSON.

Runs in an environment with both TRL and agentrl. TRL's own loss function is called on its own
padded batches of eight rows (its default), with the same model, optimizer and precision as the
other rows. A record that is one growing conversation is one row with masked tool results; if
contexts are edited, TRL has no row for several turns, and each turn is a separate row. TRL's packed
prefix tries (its asynchronous trainer) need the FlashAttention 3 kernel, which is not available on
CPU.
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from tree_row import Memory, Row, make_model, quickest, step_seconds
from tree_workloads import make_groups
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from agentrl.config.sections import TrainerSection
from agentrl.data.tokens import TurnTokens
from agentrl.distributed import clip_gradients
from agentrl.trainer.learner.optimizer import make_optimizer

BATCH_ROWS = 8


class TrlRow:
    """A prompt, its continuation, and which tokens of it were sampled."""

    def __init__(self, turns: Sequence[TurnTokens]) -> None:
        """Create the row of turns that extend each other."""
        last = turns[-1]
        start = turns[0].num_prompt_tokens
        self.prompt = last.full_ids[:start]
        self.completion = last.full_ids[start:]
        self.mask = np.zeros(len(self.completion), dtype=np.int64)
        self.logprobs = np.zeros(len(self.completion), dtype=np.float32)
        for turn in turns:
            sampled = slice(turn.num_prompt_tokens - start, len(turn.full_ids) - start)
            self.mask[sampled] = 1
            self.logprobs[sampled] = turn.behavior_logprobs
        self.advantage = last.advantage


def make_rows(row: Row) -> list[TrlRow]:
    """Return the step's rows."""
    turns = [turn for group in make_groups(row.workload) for turn in group.turns]
    chains: dict[tuple[str, int], list[TurnTokens]] = {}
    for turn in turns:
        chains.setdefault((turn.record_id, turn.chain), []).append(turn)
    if len({record_id for record_id, _ in chains}) == len(chains):
        return [TrlRow(chain) for chain in chains.values()]
    return [TrlRow([turn]) for turn in turns]


def padded(arrays: Sequence[np.ndarray], *, left: bool) -> torch.Tensor:
    """Return the arrays as rows of one tensor, padded with zeros."""
    width = max(len(array) for array in arrays)
    out = np.zeros((len(arrays), width), dtype=arrays[0].dtype)
    for number, array in enumerate(arrays):
        out[number, width - len(array) if left else 0 :][: len(array)] = array
    return torch.from_numpy(out)


def make_batch(rows: Sequence[TrlRow], num_targets: int) -> dict[str, torch.Tensor]:
    """Return the input of TRL's loss."""
    ones = [np.ones(len(row.prompt), dtype=np.int64) for row in rows]
    more = [np.ones(len(row.completion), dtype=np.int64) for row in rows]
    return {
        "prompt_ids": padded([row.prompt for row in rows], left=True).long(),
        "prompt_mask": padded(ones, left=True),
        "completion_ids": padded([row.completion for row in rows], left=False).long(),
        "completion_mask": padded(more, left=False),
        "tool_mask": padded([row.mask for row in rows], left=False),
        "old_per_token_logps": padded([row.logprobs for row in rows], left=False),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": torch.tensor(float(num_targets)),
    }


def _no_reward(*_: Any, **__: Any) -> list[float | None]:
    return [0.0]


def make_trainer(row: Row, output_dir: str) -> GRPOTrainer:
    """Return TRL's trainer around the row's model."""
    torch.manual_seed(0)
    model = make_model(row.shape)
    config = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=BATCH_ROWS,
        beta=0.0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.3,
        use_cpu=row.device == "cpu",
        bf16=row.device != "cpu",
        gradient_checkpointing=row.device != "cpu",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_no_reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": "p"}]),
        processing_class=PreTrainedTokenizerFast.from_pretrained("assets/demo/model"),
    )
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    return trainer


def measure(row: Row, output_dir: str) -> dict[str, Any]:
    """Return the figures of the row."""
    trainer = make_trainer(row, output_dir)
    rows = make_rows(row)
    num_targets = sum(int(r.mask.sum()) for r in rows)
    batches = [
        make_batch(rows[first : first + BATCH_ROWS], num_targets)
        for first in range(0, len(rows), BATCH_ROWS)
    ]
    model = trainer.model
    assert isinstance(model, PreTrainedModel)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters, TrainerSection(), torch.device("cpu"))

    def accumulate(of: Sequence[dict[str, torch.Tensor]]) -> None:
        for batch in of:
            on_device = {name: value.to(model.device) for name, value in batch.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, on_device)
            trainer.accelerator.backward(loss)

    def update() -> None:
        clip_gradients(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def step() -> tuple[float, float]:
        return step_seconds(row.device, lambda: accumulate(batches), update)

    accumulate([make_batch(rows[:1], num_targets)])
    update()
    memory = Memory(row.device)
    step()
    return {
        "trl": trl.__version__,
        "rows": len(rows),
        "tokens": sum(len(r.prompt) + len(r.completion) for r in rows),
        "tokens_padded": sum(
            batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in batches
        ),
        "loss_terms": num_targets,
        "micro_batches": len(batches),
        "seconds": quickest([step() for _ in range(row.repeats)]),
        "memory": {"peak": memory.peak()},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Row.from_json(sys.argv[1]), folder)))
