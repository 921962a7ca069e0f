from collections.abc import Mapping
from typing import Any

import pytest
from harness.scripted_engine import replies, serve_script
from support.play import ExactScoring, begin_run, open_play, play, tool_call

from agentrl.config.sections import RolloutSection, SamplingSection
from agentrl.data import TokenTree
from agentrl.errors import InferenceError
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutContext, RolloutResult
from agentrl.rollout import context_edits as edits
from agentrl.schema import DispatchedSamplingTask, MCPTask, Message, rebuild_prompts
from agentrl.store import TrajectoryStore

TASK = MCPTask(id="train/0/q1", query="What does it cost?", system_prompt="Use tools.", answer="7")
ANSWER = "<answer>7</answer>"
OPENING: list[Message] = [
    {"role": "system", "content": "Use tools."},
    {"role": "user", "content": "What does it cost?"},
]


class FixedSummarizer:
    """A summarizer without a model; keeps what it was given."""

    def __init__(self, *, fails: bool = False) -> None:
        self.transcripts: list[str] = []
        self.fails = fails

    async def summarize_result(
        self, tool_name: str, arguments: Mapping[str, Any], content: str
    ) -> str | None:
        return f"short: {content}" if tool_name == "look" else None

    async def summarize_history(self, question: str, transcript: str) -> str:
        if self.fails:
            raise InferenceError("no summarizer responded")
        self.transcripts.append(transcript)
        return f"summary {len(self.transcripts)} <|im_end|>"


async def play_through(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    script: Any,
    *,
    summarizer: FixedSummarizer | None = None,
    room: int = 1500,
    **rollout: Any,
) -> tuple[RolloutResult, list[DispatchedSamplingTask], list[str]]:
    """Play one rollout whose context takes `room` tokens more than its first prompt."""
    with serve_script(renderer, script) as engine:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url) as plain:
            first = renderer.render(OPENING, tuple(spec.openai() for spec in plain.toolbox.specs))
            context = RolloutContext(
                store=store,
                servers=plain.servers,
                renderer=renderer,
                toolbox=plain.toolbox,
                scoring=ExactScoring(),
                rollout=RolloutSection(max_turns=20, answer_instruction="none", **rollout),
                sampling=SamplingSection(max_new_tokens=700, max_prompt_tokens=len(first) + room),
                summarizer=summarizer,
            )
            result, turns = await play(store, context)
        sent = [body["input_ids"] for body in engine.requests]
        assert [ids.tolist() for ids in rebuild_prompts(turns)] == sent
        return result, turns, [renderer.decode(ids) for ids in sent]


def thought(number: int) -> str:
    call = tool_call("look", key="lamp")
    return f"<think>{number} {'hm ' * 150}</think>{call}"


def reading(number: int) -> str:
    return f"<think>{number}</think>{tool_call('page', length=400)}"


async def test_discard_all_tools_branches_where_the_first_result_stood(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    result, turns, prompts = await play_through(
        store,
        renderer,
        tools_url,
        replies(*(reading(number) for number in range(4)), ANSWER),
        new_context="discard_all_tools",
    )
    assert result == RolloutResult("answered", "7")
    reasons = [turn.branch_reason for turn in turns]
    position = reasons.index("discard_all_tools")
    assert position > 1
    assert set(reasons) == {None, "discard_all_tools"}
    branched = turns[position]
    parent_full = len(rebuild_prompts(turns)[position - 1]) + len(turns[position - 1].output_ids)
    assert 0 < branched.shared_len < parent_full
    assert "<tool_response>" not in prompts[position]
    assert edits.RESULTS_DISCARDED in prompts[position]
    assert "<think>0</think>" in prompts[position]


async def test_discard_all_keeps_the_question_and_a_summary_that_grows(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    summarizer = FixedSummarizer()
    result, turns, prompts = await play_through(
        store,
        renderer,
        tools_url,
        replies(*(thought(number) for number in range(6)), ANSWER),
        summarizer=summarizer,
        new_context="discard_all",
    )
    assert result == RolloutResult("answered", "7")
    renewed = [i for i, turn in enumerate(turns) if turn.branch_reason == "discard_all"]
    assert len(renewed) == len(summarizer.transcripts) == 2
    prompt = prompts[renewed[0]]
    assert "summary 1" in prompt
    assert "hm hm" not in prompt
    assert "What does it cost?" in prompt
    # The second summariser reads the first summary, so nothing is forgotten twice.
    assert summarizer.transcripts[1].startswith("summary 1")
    assert "[look]\nshort: 7" in summarizer.transcripts[0]
    # Whatever a summary says, it closes no turn.
    stop = renderer.stop_token_ids[0]
    ids = rebuild_prompts(turns)[renewed[0]].tolist()
    assert ids.count(stop) == 2


async def test_renewed_contexts_stay_trainable_to_the_token(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    _, turns, _ = await play_through(
        store,
        renderer,
        tools_url,
        replies(*(thought(number) for number in range(4)), ANSWER),
        new_context="discard_all",
    )
    assert "discard_all" in [turn.branch_reason for turn in turns]
    tree = TokenTree.from_turns(turns)
    prompts = rebuild_prompts(turns)
    flat = sum(len(p) + len(t.output_ids) for p, t in zip(prompts, turns, strict=True))
    sampled = sum(len(turn.output_ids) for turn in turns)
    assert all(turn.trainable for turn in turns)
    assert sampled < tree.num_tokens < flat


async def test_without_a_summarizer_the_question_alone_stays(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    result, turns, prompts = await play_through(
        store,
        renderer,
        tools_url,
        replies(*(thought(number) for number in range(3)), ANSWER),
        new_context="discard_all",
    )
    assert result.outcome == "answered"
    position = [turn.branch_reason for turn in turns].index("discard_all")
    assert edits.WORK_DISCARDED in prompts[position]


async def test_a_context_that_stays_too_long_ends_with_its_limit(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    result, turns, _ = await play_through(
        store, renderer, tools_url, replies(thought(1)), new_context="discard_all", room=20
    )
    assert result == RolloutResult("length_limit")
    assert len(turns) == 1


async def test_repetition_compression_goes_on_with_the_repeated_replies_left_out(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    again = tool_call("look", key="rug")
    result, turns, prompts = await play_through(
        store,
        renderer,
        tools_url,
        replies(thought(1), again, again, again, ANSWER),
        new_context="discard_all_tools",
        repetition_early_stop_times=3,
        enable_repetition_compress=True,
        room=20_000,
    )
    assert result == RolloutResult("answered", "7")
    assert [turn.branch_reason for turn in turns][-1] == "repetition_discard_all_tools"
    assert prompts[-1].count('"rug"') == 1
    assert [turn.advantage for turn in turns] == [None, None, 0.0, 0.0, None]


async def test_a_summarizers_outage_fails_the_attempt_and_is_no_outcome(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    with pytest.raises(InferenceError, match="no summarizer"):
        await play_through(
            store,
            renderer,
            tools_url,
            replies(thought(1)),
            summarizer=FixedSummarizer(fails=True),
            new_context="discard_all",
        )


def test_discarding_tools_rolls_a_long_rest_back_and_keeps_roles_alternating() -> None:
    messages = list(OPENING)
    for number in range(20):
        messages.append({"role": "assistant", "content": f"a{number}"})
        messages.append({"role": "tool", "content": "t", "name": "look", "tool_call_id": "c"})
    left = edits.without_tool_results(messages, OPENING)
    assert [message["role"] for message in left] == ["system", "user", "assistant", "user"]
    # 22 messages without results: the last min(15, 22 - 10) = 12 are rolled back.
    assert left[2]["content"] == "\n\n".join(f"a{number}" for number in range(8))
    short = edits.without_tool_results(messages[:8], OPENING)
    assert short[2]["content"] == "a0\n\na1\n\na2"


def test_repetitions_go_with_what_followed_them() -> None:
    messages: list[Message] = [
        *OPENING,
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": " x "},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "y"},
    ]
    kept = [message["content"] for message in edits.without_repetitions(messages)[2:]]
    assert kept == ["x", "1", "y"]
