"""Continuous batching without HTTP: memory bounds, prefixes, retraction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines import Oracle, prompt
from transformers import PreTrainedModel

from agentrl.plugins.engine.generation import cached_attention
from agentrl.plugins.engine.generation.batch_scheduler import BatchScheduler, SchedulerLimits
from agentrl.plugins.engine.generation.token_sequence import DrawParams, TokenSequence
from agentrl.plugins.engine.weights.live_weights import read_weights

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4


def scheduler(model: PreTrainedModel, **limits: int) -> BatchScheduler:
    given = {
        "max_running": 8,
        "max_queued": 100,
        "context_length": 512,
        "prefill_tokens_per_step": 64,
        "kv_cache_bytes": 1 << 24,
        "prefix_cache_bytes": 1 << 22,
    }
    return BatchScheduler(model, SchedulerLimits(**(given | limits)), "1")


def sequence(number: int, length: int = 20, new: int = 20, **fields: Any) -> TokenSequence:
    params = DrawParams(max_new_tokens=new, seed=number)
    return TokenSequence.start(f"{number:032x}", prompt(number, length), params, **fields)


def prior(priority: int, item: TokenSequence) -> TokenSequence:
    item.priority = priority
    return item


def run(engine: BatchScheduler, *sequences: TokenSequence) -> None:
    engine.submit_all(sequences)
    while engine.has_work:
        engine.step()


def check(oracle: Oracle, checkpoint: Path, sequences: list[TokenSequence]) -> None:
    for item in sequences:
        assert item.finish is not None
        output = np.array(item.output_ids)
        expected = oracle.logprobs(checkpoint, item.tokens[: item.num_prompt], output)
        np.testing.assert_allclose(item.output_logprobs, expected, atol=1e-4)


def test_more_sequences_than_rows_all_end(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    sequences = [sequence(n, 5 + 13 * n, 3 + 5 * (n % 7)) for n in range(24)]
    engine = scheduler(model)
    run(engine, *sequences)
    assert [len(s.output_ids) for s in sequences] == [3 + 5 * (n % 7) for n in range(24)]
    assert len(engine.take_events()[0]) == 24
    assert engine.is_idle
    check(oracle, checkpoint, sequences)


def test_short_memory_retracts_and_loses_nothing(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model, kv_cache_bytes=400 * TOKEN_BYTES, context_length=512)
    sequences = [sequence(n, 20, 150) for n in range(5)]
    run(engine, *sequences)
    assert [len(s.output_ids) for s in sequences] == [150] * 5
    assert sum(s.num_retractions for s in sequences) > 0
    check(oracle, checkpoint, sequences)


def test_one_sequence_may_exceed_the_memory_bound(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model, kv_cache_bytes=100 * TOKEN_BYTES, context_length=512)
    sequences = [sequence(1, 300, 50), sequence(2, 20, 30)]
    run(engine, *sequences)
    check(oracle, checkpoint, sequences)


def test_engine_without_prefix_cache_computes_everything(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model, prefix_cache_bytes=0)
    first, again = sequence(1, 50), sequence(1, 50)
    run(engine, first)
    run(engine, again)
    assert again.num_cached == 0
    check(oracle, checkpoint, [first, again])


def test_prefix_store_keeps_within_its_bound(model: PreTrainedModel) -> None:
    engine = scheduler(model, prefix_cache_bytes=200 * TOKEN_BYTES)
    for number in range(10):
        run(engine, sequence(number, 60, 5))
        assert engine.load().num_prefix_tokens <= 200
    late, early = sequence(9, 60, 5), sequence(0, 60, 5)
    run(engine, late, early)
    assert (late.num_cached, early.num_cached) == (59, 0)


def test_next_turn_replaces_what_it_continues(model: PreTrainedModel) -> None:
    engine = scheduler(model)
    first = sequence(1, 40, 10)
    run(engine, first)
    kept = engine.load().num_prefix_tokens
    assert kept == 49  # the last sampled token was never computed
    turn = np.concatenate([first.tokens[: first.length], prompt(2, 15)])
    second = TokenSequence.start("b" * 32, turn, DrawParams(max_new_tokens=5))
    run(engine, second)
    assert second.num_cached == 49
    assert engine.load().num_prefix_tokens == len(turn) + 4


def test_sequences_share_a_prompt_that_is_still_running(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model, prefix_cache_bytes=0)
    group = [sequence(1, 100, 30) for _ in range(4)]
    for number, item in enumerate(group):
        item.rid = f"{number:032x}"
    run(engine, *group)
    assert [item.num_cached for item in group] == [0, 99, 99, 99]
    check(oracle, checkpoint, group)


def test_rows_that_begin_alike_read_that_once(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared: list[tuple[int, list[list[int]]]] = []
    join = cached_attention._join_shared

    def noted(*args: Any) -> Any:
        positions = args[3]
        shared.append((positions.length, [rows.tolist() for rows in positions.groups]))
        return join(*args)

    monkeypatch.setattr(cached_attention, "_join_shared", noted)
    engine = scheduler(model, context_length=1024)
    tools = prompt(1000, 300)
    sequences = []
    for number in range(6):
        start = prompt(2000, 280) if number == 4 else tools
        ids = np.concatenate([start, prompt(number, 5 + 30 * number)])
        params = DrawParams(max_new_tokens=60 + number, seed=number)
        sequences.append(TokenSequence.start(f"{number:032x}", ids, params))
    engine.submit_all(sequences)
    for _ in range(40):
        engine.step()
    assert all(0 < len(item.output_ids) < 60 for item in sequences)
    assert (300, 2) in {(length, len(rows)) for length, rows in shared}  # one begins otherwise
    # What is computed under other weights is not what the running rows hold.
    engine.weights_changed("2", ())
    late = [
        TokenSequence.start(f"{number:032x}", np.append(tools, number), DrawParams(12, seed=number))
        for number in (6, 7)
    ]
    run(engine, *late)
    groups = [rows for length, rows in shared if length == 300 and len(rows) == 3]
    assert groups, "old rows and new ones are two groups"
    check(oracle, checkpoint, [*sequences, *late])


def test_aborts_hit_running_prefilling_waiting_and_held(model: PreTrainedModel) -> None:
    engine = scheduler(model, max_running=3)
    decoding, prefilling = sequence(1, 20, 100), sequence(2, 300, 100)
    third, waiting, held = sequence(3, 20, 100), sequence(4), sequence(5)
    engine.submit_all([decoding, third, prefilling, waiting])
    for _ in range(3):
        engine.step()
    engine.pause("in_place")
    engine.submit(held)
    assert 0 < prefilling.num_computed < 300
    for item in (decoding, prefilling, waiting, held):
        engine.abort(item.rid)
        assert item.finish is not None
        assert item.finish.kind == "abort"
    assert len(decoding.output_ids) == len(decoding.output_logprobs) > 0
    assert third.finish is None
    engine.resume()
    run(engine)
    assert len(third.output_ids) == 100


def test_retracted_prefill_starts_over(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model)
    sequences = [sequence(1, 20, 60), sequence(2, 300, 20)]
    engine.submit_all(sequences)
    for _ in range(3):
        engine.step()
    engine.pause("retract")
    assert engine.load().num_running == 0
    assert not engine.has_work
    engine.resume()
    run(engine)
    assert [item.num_retractions for item in sequences] == [1, 1]
    check(oracle, checkpoint, sequences)


def test_versions_change_exactly_at_the_update(
    model: PreTrainedModel,
    checkpoint: Path,
    second_checkpoint: Path,
    oracle: Oracle,
) -> None:
    engine = scheduler(model)
    item = sequence(1, 30, 40)
    engine.submit(item)
    for _ in range(10):
        engine.step()
    engine.pause("retract")
    engine.install(read_weights(second_checkpoint, model), "2")
    engine.resume()
    run(engine)
    assert item.versions == [("1", 0), ("2", 10)]
    output = np.array(item.output_ids)
    old = oracle.logprobs(checkpoint, item.tokens[:30], output)
    new = oracle.logprobs(second_checkpoint, item.tokens[:30], output)
    np.testing.assert_allclose(item.output_logprobs[:10], old[:10], atol=1e-4)
    np.testing.assert_allclose(item.output_logprobs[10:], new[10:], atol=1e-4)


def test_nothing_is_computed_while_somebody_writes_to_the_weights(model: PreTrainedModel) -> None:
    engine = scheduler(model)
    engine.pause("retract")
    engine.begin_weights()
    engine.submit(item := sequence(1))
    engine.resume()
    assert not engine.has_work
    engine.weights_changed("2", [])
    run(engine)
    assert item.versions == [("2", 0)]


def ending_order(engine: BatchScheduler) -> list[int]:
    """Compute everything; return the numbers of the sequences in the order in which they end."""
    while engine.has_work:
        engine.step()
    return [int(ended.rid, 16) for ended in engine.take_events()[0]]


def test_sequences_wait_by_priority_then_by_arrival(model: PreTrainedModel) -> None:
    engine = scheduler(model, max_running=2)
    priorities = [-6, -7, None, -20, -20, -1, None, -3]
    for number, priority in enumerate(priorities):
        item = sequence(number, 20, 10)
        engine.submit(item if priority is None else prior(priority, item))
        if number == 1:
            engine.step()  # both run, and what comes later does not interrupt them
    assert ending_order(engine) == [0, 1, 5, 7, 3, 4, 2, 6]


def test_what_came_during_a_pause_takes_its_place_in_the_queue(model: PreTrainedModel) -> None:
    engine = scheduler(model, max_running=2)
    for number in range(4):
        engine.submit(prior(-number, sequence(number, 20, 10)))
    engine.step()
    engine.pause("retract")
    engine.submit(prior(-1, sequence(4, 20, 10)))
    engine.submit(prior(3, sequence(5, 20, 10)))
    engine.resume()
    # The first has one token already. The second was retracted, and goes before its equal.
    assert ending_order(engine) == [0, 5, 1, 4, 2, 3]


def test_full_queue_refuses_with_503(model: PreTrainedModel) -> None:
    engine = scheduler(model, max_queued=2)
    sequences = [sequence(n) for n in range(3)]
    for one in sequences:
        engine.submit_all([one])
    assert sequences[2].finish is not None
    assert sequences[2].finish.status == 503
    [refused], _ = engine.take_events()
    assert refused is sequences[2]
    run(engine)
    assert sequences[1].finish is not None


@pytest.mark.parametrize("start", [0, 30, 99])
def test_prompt_logprobs_over_several_chunks(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle, start: int
) -> None:
    engine = scheduler(model)
    run(engine, sequence(1, 150, 5))
    scored = TokenSequence.start(
        "c" * 32, prompt(1, 150), DrawParams(max_new_tokens=0), prompt_logprobs_from=start
    )
    run(engine, scored)
    assert scored.output_ids == []
    expected = oracle.logprobs(checkpoint, prompt(1, 150)[: start + 1], prompt(1, 150)[start + 1 :])
    np.testing.assert_allclose(scored.prompt_logprobs, expected, atol=1e-4)


def test_prompt_logprobs_survive_a_retraction_midway(
    model: PreTrainedModel, checkpoint: Path, oracle: Oracle
) -> None:
    engine = scheduler(model)
    ids = prompt(1, 150)
    scored = TokenSequence.start(
        "c" * 32, ids, DrawParams(max_new_tokens=4), prompt_logprobs_from=10
    )
    engine.submit(scored)
    engine.step()
    engine.pause("retract")
    engine.resume()
    run(engine)
    assert scored.num_retractions == 1
    expected = oracle.logprobs(checkpoint, ids[:11], ids[11:])
    np.testing.assert_allclose(scored.prompt_logprobs, expected, atol=1e-4)
