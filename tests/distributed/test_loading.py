"""Ranks load their parts of a model, take memory for no more, and hold what one process loads."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gloo_ranks import run_ranks
from support.training import write_moe_model
from transformers import Qwen3Config, Qwen3ForCausalLM

SLACK = 8 * 2**20
"""Bytes for everything but weights: file headers, mesh, Python objects."""


def load(
    model: Path, output: Path, num_ranks: int, meshes: list[dict[str, int]]
) -> list[list[dict[str, Any]]]:
    """What every rank found on every mesh, and at last alone."""
    run_ranks(
        "load_run.py",
        num_ranks,
        *(model, output, json.dumps(meshes)),
        MALLOC_MMAP_THRESHOLD_="65536",
        MALLOC_TRIM_THRESHOLD_="65536",
    )
    return [json.loads((output / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


@pytest.mark.distributed
def test_a_rank_takes_memory_for_its_part_and_one_tensor(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
    )
    # In several files, as large models are.
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model", max_shard_size="40MB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    for rank in load(tmp_path / "model", tmp_path, 2, [{}, {"tp": 2}]):
        *meshes, alone = rank
        for found in meshes:
            assert alone["held"] * 0.49 < found["held"] < alone["held"] * 0.51
            assert found["taken"] < found["held"] + found["largest"] + SLACK
            assert found["taken"] < alone["held"]
        assert alone["taken"] > 0.95 * alone["held"], "what is measured is memory"


@pytest.mark.distributed
@pytest.mark.slow
def test_a_model_of_a_billion_parameters_is_nowhere_whole(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    config = Qwen3Config(
        vocab_size=100_000,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="500MB")
    ranks = load(tmp_path / "model", tmp_path, 2, [{}])
    shutil.rmtree(tmp_path / "model")
    for rank, (found, alone) in enumerate(ranks):
        record_property(f"rank {rank}", {"rank": found, "alone": alone})
        assert alone["held"] > 2 * 10**9
        assert found["held"] < alone["held"] * 0.51
        assert found["taken"] < found["held"] + found["largest"] + SLACK
        assert found["taken"] < alone["taken"] * 0.75


@pytest.mark.distributed
def test_parts_of_experts_are_those_that_one_process_loads(tmp_path: Path) -> None:
    meshes: list[dict[str, int]] = [
        {},
        {"tp": 2},
        {"cp": 4},
        {"ep": 2},
        {"ep": 4},
        {"ep": 2, "tp": 2},
        {"ep": 2, "cp": 2},
        {"dp_replicate": 2, "ep": 2},
    ]
    ranks = load(write_moe_model(tmp_path / "model"), tmp_path, 4, meshes)
    assert [len(rank) for rank in ranks] == [len(meshes) + 1] * 4
