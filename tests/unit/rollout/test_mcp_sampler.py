import asyncio
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.scripted_engine import ScriptedEngine, replies, serve_script
from support.play import TOOL_SERVER, ExactScoring, begin_run, claim, open_play, play, tool_call
from support.tool_server import INJECTION

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.errors import ConfigError, InferenceError, RenderError, ToolError
from agentrl.renderers.renderer import Renderer
from agentrl.renderers.reply import Reply
from agentrl.rollout import MCPSampler, RolloutResult, async_sampler
from agentrl.rollout.recorded_turns import RecordedTurns
from agentrl.schema import DispatchedSamplingTask, MCPTask, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.tools.servers.connection import ServerConnection

TASK = MCPTask(
    id="train/0/q1", query="What does the lamp cost?", system_prompt="Use tools.", answer="7"
)
ANSWER = "<answer>7</answer>"
UNTOLD = {"max_turns": 9, "answer_instruction": "none"}
"""The limit of 1,041 tokens is that of the prompt without an instruction."""


def assert_prompts_as_sent(turns: Sequence[DispatchedSamplingTask], engine: ScriptedEngine) -> None:
    sent = [np.array(body["input_ids"], dtype=np.int32) for body in engine.requests]
    rebuilt = rebuild_prompts(turns)
    assert [ids.tobytes() for ids in rebuilt] == [ids.tobytes() for ids in sent]


async def test_a_tool_call_leads_to_its_result_and_then_to_an_answer(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = replies(f"<think>look it up</think>{tool_call('look', key='lamp')}", ANSWER)
    with serve_script(renderer, script, version=3) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("answered", "7")
    first, second = turns
    assert (first.parent, second.parent) == (None, 0)
    assert [message["role"] for message in first.added_messages] == ["system", "user"]
    assert second.added_messages == ()
    assert [(r.call_id, r.name, r.content) for r in first.tool_results] == [
        ("call_0_0", "look", "7")
    ]
    assert {tool["function"]["name"] for tool in first.tools} >= {"look", "slow"}
    assert second.tools == ()
    assert second.shared_len == len(engine.requests[0]["input_ids"]) + len(first.output_ids)
    assert first.output_ids[-1] == renderer.stop_token_ids[0]
    assert first.version_spans[0].version == 3
    assert_prompts_as_sent(turns, engine)


async def test_what_a_server_says_about_its_use_follows_the_system_prompt(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            shared = context.toolbox._connections["default"]
            assert isinstance(shared, ServerConnection)
            shared.instructions = "Prices are in euro."  # as the server would have said
            _, (turn,) = await play(store, context)
    assert turn.added_messages[0]["content"] == (
        "Use tools.\n\nInstructions of the tool server default:\nPrices are in euro."
    )


async def test_a_rollout_is_not_resumed_on_another_prompt_and_the_difference_is_shown(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, None) as context:
            record, task = await claim(store)
            played = MCPSampler(task, record, context)
            await played.run()
            edited = task.model_copy(update={"query": "What does the rug cost?"})
            resumed = MCPSampler(edited, record, context)
            resumed.play_first(RecordedTurns.of_attempt(played.turns))
            with pytest.raises(
                RenderError,
                match=r"q1/0 cannot be resumed: its turn 0 .*: at token \d+, "
                r"'.*the lamp cos' became '.*the rug cost'",
            ):
                await resumed.run()
    assert len(engine.requests) == 1


async def test_a_resumed_rollout_repeats_the_results_and_counts_the_replies(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, tool_log: Path
) -> None:
    both = tool_call("look", key="rug") + "\n" + tool_call("look", key="lamp")
    before = len(tool_log.read_text())
    with serve_script(
        renderer, replies(both, tool_call("look", key="lamp"), both, ANSWER)
    ) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            record, task = await claim(store)
            short = replace(context, rollout=RolloutSection(max_turns=2))
            stopped, resumed = (MCPSampler(task, record, one) for one in (short, context))
            await stopped.run()
            await stopped.finish()
            resumed.play_first(RecordedTurns.of_attempt(await store.turns.of_record(record.id)))
            assert await resumed.run() == RolloutResult("answered", "7")
            await resumed.finish()
            turns = await store.turns.of_record(record.id)
    assert [turn.advantage for turn in turns] == [None, None, 0.0, None]
    assert_prompts_as_sent(turns, engine)
    assert len(tool_log.read_text()[before:].splitlines()) == 5


async def test_a_long_reply_is_parsed_off_the_event_loop(
    store: TrajectoryStore, renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    parse = Renderer.parse

    def noted(*args: Any, **named: Any) -> Reply:
        threads.append(threading.current_thread())
        return parse(*args, **named)

    monkeypatch.setattr(Renderer, "parse", noted)
    monkeypatch.setattr(async_sampler, "_LONG_REPLY_TOKENS", 25)
    rollout = RolloutSection(max_reminders=1)
    with serve_script(renderer, replies("word " * 20, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, None, rollout=rollout) as context:
            result, _ = await play(store, context)
    assert result == RolloutResult("answered", "7")
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


async def test_a_task_that_could_not_be_scored_is_not_played(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    class Unknown(ExactScoring):
        def check(self, scorer: str) -> None:
            raise ConfigError(f"unknown scorer {scorer!r}")

    with serve_script(renderer, lambda _: "<answer>7</answer>") as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, None, scoring=Unknown()) as context:
            record, claimed = await claim(store)
            with pytest.raises(ConfigError, match="unknown scorer 'agentcpm'"):
                await MCPSampler(claimed, record, context).run()
            elsewhere = context.rollout.model_copy(update={"scoring": "elsewhere"})
            context = replace(context, rollout=elsewhere)
            result = await MCPSampler(claimed, record, context).run()
    assert result == RolloutResult("answered", "7")
    assert len(engine.requests) == 1


async def test_calls_of_one_turn_run_in_order_and_share_one_message(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, tool_log: Path
) -> None:
    both = tool_call("look", key="rug") + "\n" + tool_call("look", key="lamp")
    before = len(tool_log.read_text())
    with serve_script(renderer, replies(both, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result.outcome == "answered"
    assert tool_log.read_text()[before:].splitlines() == [
        "look {'key': 'rug'}",
        "look {'key': 'lamp'}",
    ]
    assert [r.content for r in turns[0].tool_results] == ["12", "7"]
    assert_prompts_as_sent(turns, engine)


async def test_a_format_error_is_an_observation_and_never_rewarded(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = replies('<tool_call>{"name": "look", </tool_call>', ANSWER)
    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result.outcome == "answered"
    assert turns[0].advantage == 0.0
    assert turns[1].advantage is None
    (error,) = turns[0].tool_results
    assert error.is_error
    assert error.content.startswith("format error: invalid JSON")
    prompt = renderer.decode(engine.requests[1]["input_ids"])
    assert error.content in prompt


async def test_a_tools_own_error_is_an_observation(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = replies(tool_call("look", key="sofa"), tool_call("lock", key="lamp"), ANSWER)
    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result.outcome == "answered"
    assert [t.tool_results[0].is_error for t in turns[:2]] == [True, True]
    assert "no such key" in turns[0].tool_results[0].content
    assert "Did you mean look?" in turns[1].tool_results[0].content
    assert [t.advantage for t in turns] == [None, None, None]


async def test_an_answer_inside_thinking_or_a_tool_call_is_no_answer(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = replies(
        f"<think>maybe <answer>1</answer></think>{tool_call('look', key='<answer>2</answer>')}",
        ANSWER,
    )
    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result.final_answer == "7"
    assert len(turns) == 2


async def test_a_reply_without_call_or_answer_is_reminded_and_given_up_after_three(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies("hm", "well", "who knows")) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("no_answer")
    assert len(turns) == 3
    (reminder,) = turns[1].added_messages
    assert reminder == {
        "role": "user",
        "content": "Call a tool, or answer inside <answer></answer>.",
    }
    assert_prompts_as_sent(turns, engine)


@pytest.mark.parametrize(
    "text", ["It costs 7.", tool_call("look", key="lamp"), "<tool_call>what?</tool_call>"]
)
async def test_without_tools_the_first_reply_ends_the_rollout(
    store: TrajectoryStore, renderer: Renderer, text: str
) -> None:
    with serve_script(renderer, replies(text, ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, None) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("no_answer")
    assert len(turns) == 1


async def test_configured_reminders_without_tools_name_no_tool(
    store: TrajectoryStore, renderer: Renderer
) -> None:
    rollout = RolloutSection(max_reminders=1)
    with serve_script(renderer, replies("It costs 7.", ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, None, rollout=rollout) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("answered", "7")
    (reminder,) = turns[1].added_messages
    assert reminder["content"] == "Answer inside <answer></answer>."


@pytest.mark.parametrize("num_reminders", [0, 1])
async def test_a_rollout_with_tools_gets_as_many_reminders_as_configured(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, num_reminders: int
) -> None:
    rollout = RolloutSection(max_reminders=num_reminders)
    with serve_script(renderer, replies("hm", "well", "who knows")) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("no_answer")
    assert len(turns) == num_reminders + 1


@pytest.mark.parametrize(
    ("texts", "rollout", "sampling", "context_length", "outcome", "num_turns"),
    [
        (["go"], {"max_turns": 2}, {}, None, "turns_limit", 2),
        (["x" * 50], {}, {"max_new_tokens": 20}, None, "length_limit", 1),
        (["CALL"], UNTOLD, {"max_prompt_tokens": 1041}, None, "length_limit", 1),
        (["CALL"], UNTOLD, {}, 1041, "length_limit", 1),
        (["CALL"], {"max_turns": 9, "max_tool_calls": 2}, {}, None, "tool_calls_limit", 3),
        (
            ["<tool_call>" * 9],
            {"max_turns": 9, "max_tool_calls": 8},
            {},
            None,
            "tool_calls_limit",
            1,
        ),
        (["CALL"], {"max_turns": 9, "repetition_early_stop_times": 3}, {}, None, "repetition", 3),
    ],
)
async def test_limits_end_a_rollout_with_their_own_outcome(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    texts: list[str],
    rollout: dict[str, int],
    sampling: dict[str, int],
    context_length: int | None,
    outcome: str,
    num_turns: int,
) -> None:
    texts = [text.replace("CALL", tool_call("look", key="lamp")) for text in texts]
    with serve_script(renderer, replies(*texts)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(
            store,
            engine,
            tools_url,
            rollout=RolloutSection(**rollout),
            sampling=SamplingSection(**({"max_new_tokens": 200} | sampling)),
            context_length=context_length,
        ) as context:
            result, turns = await play(store, context)
    assert (result.outcome, result.final_answer) == (outcome, None)
    assert len(turns) == num_turns
    assert_prompts_as_sent(turns, engine)


async def test_repeated_replies_are_never_rewarded(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    script = replies(tool_call("look", key="lamp"), tool_call("look", key="lamp"), ANSWER)
    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            _, turns = await play(store, context)
    assert [turn.advantage for turn in turns] == [None, 0.0, None]


async def test_the_wall_clock_ends_a_rollout_that_has_turns(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies(tool_call("slow", seconds=5))) as engine:
        await begin_run(store, engine, TASK)
        rollout = RolloutSection(rollout_timeout_seconds=0.7)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            result, turns = await play(store, context)
    assert result == RolloutResult("time_limit")
    assert len(turns) == 1


async def test_no_reply_at_all_within_the_wall_clock_is_no_outcome(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies(ANSWER), delay_seconds=1) as engine:
        await begin_run(store, engine, TASK)
        rollout = RolloutSection(rollout_timeout_seconds=0.3)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            with pytest.raises(InferenceError, match="rollout_timeout_seconds"):
                await play(store, context)


async def test_markup_in_tool_results_and_questions_never_becomes_special_tokens(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    task = TASK.model_copy(update={"query": f"Say {INJECTION} please."})
    with serve_script(renderer, replies(tool_call("shout", text="x"), ANSWER)) as engine:
        await begin_run(store, engine, task)
        async with open_play(store, engine, tools_url) as context:
            result, turns = await play(store, context)
    assert result.outcome == "answered"
    assert turns[0].tool_results[0].content == INJECTION
    prompt = engine.requests[1]["input_ids"]
    assert renderer.decode(prompt).count(INJECTION) == 2
    # system, user, assistant, tool response: four turns are closed by the template or the model,
    # none by foreign text; the last one is open.
    im_end, im_start = renderer.stop_token_ids[0], int(prompt[0])
    assert (prompt.count(im_end), prompt.count(im_start)) == (4, 5)
    assert_prompts_as_sent(turns, engine)


async def test_a_dead_tool_server_is_an_error_and_not_an_observation(
    store: TrajectoryStore, renderer: Renderer, tmp_path: Path
) -> None:
    args = [str(TOOL_SERVER), str(tmp_path / "log")]
    command = {"command": sys.executable, "args": args, "writable": [str(tmp_path)]}
    with serve_script(renderer, replies(tool_call("crash"), ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, {"own": command}) as context:
            with pytest.raises(ToolError):
                await play(store, context)


async def test_rollouts_go_on_across_a_weight_update(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies("x"), version=4) as engine:
        texts = replies(tool_call("look", key="lamp"), ANSWER)

        def script(prompt: str) -> str:
            engine.version += 1
            return texts(prompt)

        engine.script = script
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as context:
            _, turns = await play(store, context)
            record = await store.records.get(turns[0].record_id)
    assert [turn.version_spans[0].version for turn in turns] == [5, 6]
    assert record is not None
    assert (record.min_version, record.max_version) == (5, 6)


async def test_every_sampling_parameter_reaches_the_engine(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    asked = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.1,
        "max_new_tokens": 64,
    }
    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK)
        sampling = SamplingSection.model_validate(asked)
        async with open_play(store, engine, tools_url, sampling=sampling) as context:
            _, turns = await play(store, context)
    sent = engine.requests[0]["sampling_params"]
    assert {name: sent[name] for name in asked} == asked
    assert turns[0].sampling_params.model_dump(include=set(asked)) == asked


async def test_the_tries_of_a_group_ask_with_different_seeds(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK.model_copy(update={"num_generations": 4}))
        async with open_play(store, engine, tools_url) as context:
            played = await asyncio.gather(*(play(store, context) for _ in range(4)))
    assert len({turns[0].sampling_params.seed for _, turns in played}) == 4


@pytest.mark.parametrize(
    ("setting", "system_prompt", "seen"),
    [
        ("auto", "", f"{TASK.query}\n\nPut the final answer inside <answer></answer>."),
        ("auto", "Write <answer></answer>.", TASK.query),
        ("none", "", TASK.query),
        ("Be brief.", "Write <answer></answer>.", f"{TASK.query}\n\nBe brief."),
    ],
)
async def test_a_model_that_is_not_told_the_answer_schema_is_told_it(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    setting: str,
    system_prompt: str,
    seen: str,
) -> None:
    with serve_script(renderer, replies(ANSWER)) as engine:
        await begin_run(store, engine, TASK.model_copy(update={"system_prompt": system_prompt}))
        rollout = RolloutSection(answer_instruction=setting)
        async with open_play(store, engine, tools_url, rollout=rollout) as context:
            result, (turn,) = await play(store, context)
    assert result == RolloutResult("answered", "7")
    assert turn.added_messages[-1]["content"] == seen
