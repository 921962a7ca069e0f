"""Groups with scores and turns as samplers leave them, made by hand for trainers to read."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.tiny_tokenizer import write_tokenizer
from support.stored import read_back
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.config.sections import RootConfig
from agentrl.schema import (
    DispatchedSamplingTask,
    MCPTask,
    Record,
    SamplingParams,
    Score,
    VersionSpan,
)
from agentrl.store import TrajectoryStore

VOCABULARY = 272
MakeConfig = Callable[..., RootConfig]
"""The fixture that makes the configuration of a run from the flags that matter to a test."""


def write_model(directory: Path, seed: int = 0, *, max_position_embeddings: int = 256) -> Path:
    """A random Qwen3 of two layers with a tokenizer beside it."""
    write_tokenizer(directory)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        eos_token_id=258,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    return directory


def write_moe_model(directory: Path, seed: int = 0) -> Path:
    """A random Qwen3-MoE of two layers, one of them dense, with a tokenizer beside it."""
    write_tokenizer(directory)
    torch.manual_seed(seed)
    # Its own parameters do not name `head_dim`, which it takes all the same.
    sizes: dict[str, Any] = {"head_dim": 8}
    config = Qwen3MoeConfig(
        **sizes,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=258,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def train_tasks(num_groups: int, num_generations: int) -> list[MCPTask]:
    return [
        MCPTask(
            id=f"train/0/q{number}",
            order=number,
            num_generations=num_generations,
            query=f"question {number}",
            answer=str(number),
            scorer="exact",
            dataset_id=f"q{number}",
        )
        for number in range(num_groups)
    ]


class Player:
    """Plays slots with random tokens, and says how likely the model found them."""

    def __init__(self, model_path: Path, seed: int = 0) -> None:
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            model_path, dtype=torch.float32
        ).eval()
        self.rng = np.random.default_rng(seed)

    def tokens(self, count: int) -> np.ndarray:
        return self.rng.integers(0, 256, size=count).astype(np.int32)

    @torch.no_grad()
    def logprobs(self, prompt: np.ndarray, output: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))[None]
        logprobs = self.model(ids).logits[0].log_softmax(-1)
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(output) - 1)
        found: np.ndarray = logprobs[rows, ids[0, len(prompt) :]].numpy()
        return found

    def turns(
        self, record: Record, *, version: int, num_turns: int
    ) -> list[DispatchedSamplingTask]:
        turns: list[DispatchedSamplingTask] = []
        # The tries of a group share their prompt.
        group = np.random.default_rng([1, (record.order + 1000) % 2**32])
        full = np.empty(0, dtype=np.int32)
        for index in range(num_turns):
            added = (
                group.integers(0, 256, size=6).astype(np.int32) if index == 0 else self.tokens(3)
            )
            output = self.tokens(4)
            prompt = np.concatenate([full, added])
            turns.append(
                DispatchedSamplingTask(
                    id=f"{record.id}/{record.fence}/{index}",
                    record_id=record.id,
                    task_id=record.task_id,
                    attempt=record.attempt,
                    index=index,
                    parent=index - 1 if index else None,
                    shared_len=len(full),
                    added_ids=added,
                    output_ids=output,
                    output_logprobs=self.logprobs(prompt, output),
                    version_spans=(VersionSpan(version=version, start=0, end=len(output)),),
                    finish_reason="stop",
                    sampling_params=SamplingParams(),
                )
            )
            full = np.concatenate([prompt, output])
        return turns

    async def play(
        self,
        store: TrajectoryStore,
        score: float,
        *,
        version: int = 0,
        num_turns: int = 2,
    ) -> Record:
        """Claim the next slot, play it and score it."""
        claimed = await store.records.claim(
            "player:1:0", lease_seconds=30, admitted_groups=10**6, max_attempts=3
        )
        assert claimed is not None
        return await self.finish(store, claimed[0], score, version=version, num_turns=num_turns)

    async def finish(
        self,
        store: TrajectoryStore,
        record: Record,
        score: float,
        *,
        version: int = 0,
        num_turns: int = 2,
        step_scores: Sequence[float | None] = (),
    ) -> Record:
        """Play a claimed slot to its end and score it."""
        for turn in self.turns(record, version=version, num_turns=num_turns):
            await store.turns.append(turn, record.fence)
        await store.records.finish(
            record.id, record.fence, outcome="answered", final_answer="1", lease_seconds=30
        )
        verdict = Score(scorer="exact", value=score, step_scores=tuple(step_scores))
        await store.scores.set(record.id, record.fence, verdict)
        return await read_back(store, record)

    async def play_groups(
        self,
        store: TrajectoryStore,
        scores: Sequence[Sequence[float]],
        *,
        version: int = 0,
        num_turns: int = 2,
    ) -> None:
        """Play whole groups, one list of scores each, in the order of the tasks."""
        for group in scores:
            for score in group:
                await self.play(store, score, version=version, num_turns=num_turns)


async def teach(store: TrajectoryStore, name: str, differences: Sequence[float]) -> None:
    """Give every record a teacher who differs from the sampler by these, in turn, at all tokens."""
    number = 0
    while (record := await store.teaching.claim(name, "teacher", 60)) is not None:
        difference = differences[number % len(differences)]
        given = {turn.id: turn.output_logprobs + np.float32(difference) for turn in record.turns}
        await store.teaching.store(name, record.record_id, given)
        number += 1
