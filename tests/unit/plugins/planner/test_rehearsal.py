"""The trainer's paths on tensors without values: what they hold, and where they wait for the device."""

import sys
import traceback
from collections import Counter
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from harness.tiny_families import FAMILIES, tiny_config
from support.training import write_model, write_moe_model
from torch._subclasses.fake_tensor import FakeTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

import agentrl
from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.data import MicroBatch
from agentrl.distributed import MeshShape
from agentrl.plugins.planner import rehearsal
from agentrl.plugins.planner.rehearsal import (
    FakeDevice,
    StepMemory,
    ValueReads,
    filled_row,
    rehearse,
    rehearse_run,
)
from agentrl.trainer.learner import rank_models
from agentrl.trainer.learner.learner import Learner
from agentrl.trainer.learner.settings import LearnerSettings, StartWeights

NUM_TOKENS = 48
PACKAGE = Path(agentrl.__file__).parent
KNOWN = {
    # The figures of a micro-batch, after its passes.
    "trainer/learner/passes.py:outcome": 1,
    "trainer/learner/learner.py:add": 2,
    "trainer/learner/target_stats.py:of": 9,
    # The norm of all gradients decides whether the step is made.
    "distributed/sharding.py:squared_norms": 1,
}
"""Where a step of one micro-batch waits for the device."""
COPIES_OF_LOGITS = 5.5
"""In float32 at a time: temperature, softmax, entropy and gradients make 5.2."""
pytestmark = [
    pytest.mark.filterwarnings("ignore:Slicing a flattened dim"),
    pytest.mark.filterwarnings("ignore:`_get_pg_default_device`"),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe_model(tmp_path_factory.mktemp("mixture"))


class Places(ValueReads):
    """Counts the places of this package that read a value of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs)
        was_on_device = bool(args) and isinstance(args[0], FakeTensor) and args[0].is_meta
        is_there = isinstance(result, torch.Tensor) and result.is_meta
        is_property = getattr(function, "__name__", "") == "__get__"
        if was_on_device and not is_there and not is_property and reads_values(function, result):
            self._count()
        return result

    def _count(self) -> None:
        for frame, _ in traceback.walk_stack(sys._getframe()):
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE) and "planner" not in path.parts:
                name = frame.f_code.co_name
                self.found[f"{path.relative_to(PACKAGE).as_posix()}:{name}"] += 1
                return


def reads_values(function: Any, result: Any) -> bool:
    is_copied = isinstance(result, FakeTensor)
    return is_copied or getattr(function, "__name__", "") in rehearsal._READERS


class MetaRank(rehearsal._SingleRank):
    """Computes on a device that is not the host: a tensor left there is an error."""

    @property
    def device(self) -> torch.device:
        return torch.device("meta")


def places_of_a_step(path: Path, **flags: Any) -> dict[str, int]:
    settings, batch = step_of(path, flags)
    reads = Places()
    with rehearsal._fake_tensors("cpu"), reads, ExitStack() as stack:
        stack.enter_context(patch.object(rank_models, "start_adapter"))
        # torch has no autocast for this device.
        for name, replacement in (("autocast", nullcontext), ("is_autocast_enabled", bool)):
            stack.enter_context(patch.object(torch, name, lambda *_, as_=replacement, **__: as_()))
        learner = Learner(settings, MetaRank(0, 1, shape=MeshShape()))
        reads.found.clear()
        learner.forward_backward([batch])
        learner.optim_step(0)
    return dict(reads.found)


def step_of(
    path: Path, flags: dict[str, Any], num_chunks: int = 1, num_tokens: int = NUM_TOKENS
) -> tuple[LearnerSettings, MicroBatch]:
    num_chunks = flags.pop("num_chunks", num_chunks)
    algorithm = AlgorithmSection(**flags.pop("algorithm", {}))
    model = {name: flags.pop(name) for name in list(flags) if name in ModelSection.model_fields}
    settings = LearnerSettings(
        weights=StartWeights(path),
        model=ModelSection(model_name_or_path=str(path), **{"torch_dtype": "float32", **model}),
        trainer=TrainerSection(**flags),
        algorithm=algorithm,
        seed=0,
        reference_path=path if algorithm.kl_coefficient else None,
    )
    longest = num_tokens if settings.trainer.merge == "none" else num_tokens // 2
    return settings, filled_row(num_tokens, longest, num_chunks=num_chunks)


def rehearsed(
    path: Path,
    *,
    device: FakeDevice = "cpu",
    shape: MeshShape | None = None,
    num_chunks: int = 1,
    num_tokens: int = NUM_TOKENS,
    **flags: Any,
) -> StepMemory:
    settings, batch = step_of(path, flags, num_chunks, num_tokens)
    return rehearse(settings, shape or MeshShape(), batch, device=device)


PASSES: dict[str, dict[str, Any]] = {
    "a row": {},
    "no merging": {"merge": "none"},
    "chunks": {"num_chunks": 3},
    "recomputed": {"gradient_checkpointing": True},
    "an adapter": {"lora_rank": 4},
    "a reference and GSPO": {"algorithm": {"kl_coefficient": 0.1, "recipe": "gspo"}},
}


@pytest.mark.parametrize("case", PASSES)
def test_a_micro_batch_waits_for_the_device_at_known_places_alone(case: str, dense: Path) -> None:
    own = {"trainer/learner/passes.py:loss_of": 1} if "reference" in case else {}
    assert places_of_a_step(dense, **PASSES[case]) == KNOWN | own


def test_a_chunk_holds_nothing_of_recomputed_layers_but_what_it_creates(tmp_path: Path) -> None:
    num_tokens, num_chunks, head_dim = 4096, 4, 32
    held = []
    for num_layers in (2, 6):
        config = Qwen3Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=head_dim,
        )
        path = tmp_path / str(num_layers)
        config.save_pretrained(path)
        found = rehearsed(
            path,
            device="gpu",
            torch_dtype="bfloat16",
            num_tokens=num_tokens,
            num_chunks=num_chunks,
            gradient_checkpointing=True,
            activation_offloading=True,
        )
        held.append(found.passes - found.weights - found.gradients - found.optimizer)
    keys_and_values = num_tokens // num_chunks * 2 * head_dim * 2  # bfloat16
    # What it creates and its gradients, and the weights in bfloat16.
    assert (held[1] - held[0]) / 4 <= 2.5 * keys_and_values + 150_000


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_recurrent_layers_wait_no_more(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    assert places_of_a_step(tmp_path) == KNOWN


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_rehearsed(family: str, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    found = rehearsed(tmp_path, device="gpu", torch_dtype="bfloat16", num_tokens=256)
    assert found.passes > found.weights + found.gradients + found.optimizer


def test_parts_are_those_of_the_model(dense: Path) -> None:
    found = rehearsed(dense)
    assert type(torch.empty(1)) is torch.Tensor  # tensors are real again
    assert found.num_parameters == found.num_trained
    # Storages fill blocks of 512 bytes.
    assert 1 <= found.weights / (4 * found.num_parameters) < 1.3
    assert found.gradients <= found.weights
    assert 1.9 < found.optimizer / found.gradients <= 2.4
    assert found.passes > found.weights + found.gradients + found.optimizer


def test_the_head_holds_a_few_copies_of_one_chunk_of_logits(tmp_path: Path) -> None:
    vocabulary, chunk, num_tokens = 16_384, 256, 1024
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    found = rehearsed(
        tmp_path,
        device="gpu",
        num_tokens=num_tokens,
        loss_seq_chunk_size=chunk,
        torch_dtype="bfloat16",
    )
    assert found.activations / (4 * chunk * vocabulary) < COPIES_OF_LOGITS


@pytest.mark.parametrize("kind", ["sdpa", "flex", "varlen"])
def test_a_gpu_is_played_with_the_attention_that_it_would_have(kind: str, dense: Path) -> None:
    found = rehearsed(
        dense, device="gpu", attention_implementation=kind, torch_dtype="bfloat16", num_tokens=640
    )
    assert found.peak == found.passes


def test_offloaded_activations_are_not_on_the_gpu(dense: Path) -> None:
    there = rehearsed(dense, device="gpu", num_tokens=2048)
    away = rehearsed(dense, device="gpu", num_tokens=2048, activation_offloading=True)
    assert there.offloaded == 0
    assert away.offloaded > 0
    assert away.peak < there.peak


@pytest.mark.parametrize(
    "shape",
    [MeshShape(dp_shard=4), MeshShape(dp_shard=2, tp=2), MeshShape(dp_shard=2, cp=2)],
    ids=["fsdp", "tp", "cp"],
)
def test_ranks_share_what_one_process_holds(shape: MeshShape, dense: Path) -> None:
    alone = rehearsed(dense, device="cpu")
    sizes: dict[str, Any] = {"tp_size": shape.tp, "cp_size": shape.cp}
    found = rehearsed(dense, device="cpu", shape=shape, **sizes)
    assert found.num_parameters == alone.num_parameters
    assert found.optimizer < alone.optimizer / 2


@pytest.mark.slow
def test_experts_are_dealt_out(mixture: Path) -> None:
    alone = rehearsed(mixture, device="gpu", torch_dtype="bfloat16")
    shape = MeshShape(dp_shard=1, ep=4)
    found = rehearsed(mixture, device="gpu", shape=shape, ep_size=4, torch_dtype="bfloat16")
    assert found.weights < alone.weights / 2


def test_the_fullest_stage_of_a_pipeline_is_planned(dense: Path) -> None:
    def planned(num_stages: int) -> StepMemory:
        return rehearse_run(
            ModelSection(torch_dtype="float32"),
            TrainerSection(pp_size=num_stages, num_processes=2, max_tokens=64),
            AlgorithmSection(),
            model_path=dense,
            longest=64,
            device="gpu",
        )

    whole, staged = planned(1), planned(2)
    assert (staged.num_parameters, staged.num_trained) == (whole.num_parameters, whole.num_trained)
    # Of two ranks, each holds half of the weights, or a stage of its own and the tied embedding.
    assert whole.weights < staged.weights < 2 * whole.weights
    assert staged.offloaded == 0
