"""The engine serves mixtures of experts and says which ones every token went to."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import Oracle, prompt
from support.training import write_moe_model
from transformers import AutoModelForCausalLM

from agentrl.errors import InferenceError
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.grammars import GrammarConstraint
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.generation.token_sequence import TokenSequence
from agentrl.plugins.engine.http.engine_bodies import (
    GenerationBody,
    ModelLimits,
    ParsedRequest,
    parse_generate,
    read_body,
)
from agentrl.plugins.engine.http.http_errors import InvalidRequest
from agentrl.plugins.engine.http.response_bodies import answer
from agentrl.plugins.engine.http.text_codec import TextCodec
from agentrl.plugins.engine.weights.live_weights import read_weights, swap_weights
from agentrl.schema.grammar import Grammar

LIMITS = ModelLimits(256, 272, frozenset(), has_experts=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe_model(tmp_path_factory.mktemp("moe"))


def scheduler(checkpoint: Path, **limits: int) -> BatchScheduler:
    given = {
        "max_running": 8,
        "max_queued": 100,
        "context_length": 256,
        "prefill_tokens_per_step": 16,
        "kv_cache_bytes": 1 << 22,
        "prefix_cache_bytes": 1 << 22,
    }
    model = load_model(checkpoint, torch.float32)
    return BatchScheduler(model, SchedulerLimits(**(given | limits)), "1")


def no_grammars(grammar: Grammar) -> GrammarConstraint:
    raise AssertionError("no request here has one")


def parse(body: dict[str, Any], limits: ModelLimits) -> ParsedRequest:
    return parse_generate(
        read_body(GenerationBody, body),
        limits,
        encode=lambda _: [],
        show=lambda ids, _: (np.asarray(ids, dtype=np.int32), ()),
        new_seed=lambda: 0,
        adapters={},
        constrain=no_grammars,
    )


def play(
    engine: BatchScheduler, checkpoint: Path, prompts: list[np.ndarray], new: int, start: int = 0
) -> list[tuple[TokenSequence, np.ndarray]]:
    """Run a batch of requests; return each with the experts that its answer names, [N, L, K]."""
    body: dict[str, Any] = {
        "input_ids": [ids.tolist() for ids in prompts],
        "sampling_params": {"max_new_tokens": new, "sampling_seed": 1},
        "return_routed_experts": True,
        "routed_experts_start_len": start,
    }
    parsed = parse(body, LIMITS)
    engine.submit_all(parsed.sequences)
    while engine.has_work:
        engine.step()
    text = TextCodec(str(checkpoint))
    found = []
    for sequence in parsed.sequences:
        meta = answer(sequence, parsed, text, "1")["meta_info"]
        flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype="<i4")
        found.append((sequence, flat.reshape(sequence.length - 1 - start, 3, 2)))
    return found


def expected(checkpoint: Path, sequence: TokenSequence) -> np.ndarray:
    """What transformers' own routers choose for a sequence's tokens; 0 in the dense layer."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    seen: list[torch.Tensor] = []
    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda _, __, output: seen.append(output[2]))
    with torch.no_grad():
        model(torch.from_numpy(sequence.tokens[: sequence.length - 1].astype(np.int64))[None])
    return torch.stack([torch.zeros_like(seen[0]), *seen], dim=1).numpy()


def test_experts_are_those_that_transformers_chooses(checkpoint: Path) -> None:
    engine = scheduler(checkpoint)
    prompts = [prompt(number, 20 + 7 * number) for number in range(3)]
    for sequence, choices in play(engine, checkpoint, prompts, new=12):
        assert np.array_equal(choices, expected(checkpoint, sequence))
        output = np.array(sequence.output_ids)
        logprobs = Oracle().logprobs(checkpoint, sequence.tokens[: sequence.num_prompt], output)
        np.testing.assert_allclose(sequence.output_logprobs, logprobs, atol=1e-4)


def test_experts_of_reused_prefixes_are_known(checkpoint: Path) -> None:
    engine = scheduler(checkpoint)
    ((first, _),) = play(engine, checkpoint, [prompt(1, 30)], new=8)
    longer = np.concatenate([first.tokens[: first.length], prompt(2, 10)])
    # Two at a time: one takes over what is kept, the other a row that is being computed.
    for sequence, choices in play(engine, checkpoint, [longer, longer[:36]], new=5, start=11):
        assert sequence.num_cached is not None
        assert sequence.num_cached >= 30
        assert np.array_equal(choices, expected(checkpoint, sequence)[11:])


def test_experts_survive_a_retraction(checkpoint: Path) -> None:
    token_bytes = 3 * 2 * 2 * 8 * 4
    engine = scheduler(checkpoint, kv_cache_bytes=256 * token_bytes, prefix_cache_bytes=0)
    played = play(engine, checkpoint, [prompt(number, 10) for number in range(4)], new=120)
    assert sum(sequence.num_retractions for sequence, _ in played) > 0
    for sequence, choices in played:
        assert np.array_equal(choices, expected(checkpoint, sequence))


def test_experts_that_a_model_does_not_have_are_refused() -> None:
    body = {"input_ids": [1, 2], "return_routed_experts": True}
    dense = ModelLimits(256, 272, frozenset())
    with pytest.raises(InvalidRequest, match="the model has no experts"):
        parse(body, dense)
    with pytest.raises(InvalidRequest, match="routed_experts_start_len must be in"):
        parse(body | {"routed_experts_start_len": 3}, LIMITS)


def test_new_weights_of_experts_are_read_whole_or_not_at_all(
    checkpoint: Path, tmp_path: Path
) -> None:
    model = load_model(checkpoint, torch.float32)
    other = write_moe_model(tmp_path / "other", seed=5)
    swap_weights(model, read_weights(other, model))
    wanted = load_model(other, torch.float32).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in model.state_dict().items())
    weights = load_file(other / "model.safetensors")
    lacking = dict(weights)
    del lacking["model.layers.2.mlp.experts.3.up_proj.weight"]
    unknown = weights | {"model.layers.2.mlp.experts.8.up_proj.weight": torch.zeros(16, 32)}
    odd = weights | {"model.layers.2.mlp.experts.3.up_proj.weight": torch.zeros(15, 32)}
    for changed, message in (
        (lacking, "experts of model.layers.2.mlp.experts.gate_up_proj are missing"),
        (unknown, "the model has no tensor model.layers.2.mlp.experts.8.up_proj.weight"),
        (odd, r"has shape \(15, 32\), the model expects \(16, 32\)"),
    ):
        save_file(changed, other / "model.safetensors", {"format": "pt"})
        with pytest.raises(InferenceError, match=message):
            read_weights(other, model)
