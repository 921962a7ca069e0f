"""Rollouts as a real collector sees them: scripted model, real MCP server, real store."""

from dataclasses import replace
from pathlib import Path

import pytest
from harness.scripted_engine import replies, serve_script
from support.otlp_collector import Collector, otlp_collector, values
from support.play import ExactScoring, begin_run, claim, open_play, tool_call

from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.launcher.checks import extras
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import MCPSampler
from agentrl.rollout.traces import Traces
from agentrl.rollout.worker.attempt import RolloutAttempt, SlotCounts
from agentrl.runtime.telemetry.span_export import span_export
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

SECRET = "hunter2"
TASK = MCPTask(
    id="train/0/q1", query=f"What does the lamp cost? {SECRET}", answer="7", scorer="exact"
)
REPLIES = (tool_call("look", key="lamp"), tool_call("look", key=SECRET), "<answer>7</answer>")


async def traced_attempt(
    store: TrajectoryStore,
    renderer: Renderer,
    tools_url: str,
    *texts: str,
    show_content: bool = False,
    scoring: ExactScoring | None = None,
) -> Collector:
    with serve_script(renderer, replies(*texts), version=3) as engine, otlp_collector() as found:
        await begin_run(store, engine, TASK)
        async with open_play(store, engine, tools_url, scoring=scoring) as context:
            with span_export(found.url, {}) as tracer:
                traces = Traces(tracer, "policy", show_content=show_content)
                record, task = await claim(store)
                attempt = RolloutAttempt(
                    task,
                    record,
                    replace(context, traces=traces),
                    MCPSampler,
                    SlotCounts(),
                    on_generated=lambda: None,
                )
                await attempt.start()
    return found


async def test_a_rollout_is_one_trace_from_its_turns_to_its_score(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, tool_log: Path
) -> None:
    num_calls = len(tool_log.read_text().splitlines())
    found = await traced_attempt(store, renderer, tools_url, *REPLIES)
    (record,) = [one async for one in store.records.find()]
    turns = await store.turns.of_record(record.id)
    (rollout,), chats = found.named("invoke_agent"), found.named("chat policy")
    looks, (scored,) = found.named("execute_tool look"), found.named("evaluate exact")
    assert {span.trace_id for span in found.spans} == {rollout.trace_id}
    assert {span.parent_span_id for span in (*chats, *looks, scored)} == {rollout.span_id}
    assert rollout.parent_span_id == b""
    assert values(rollout.attributes) == {
        "gen_ai.operation.name": "invoke_agent",
        "agentrl.record.id": record.id,
        "agentrl.task.id": TASK.id,
        "agentrl.split": "train",
        "agentrl.attempt": 1,
        "agentrl.outcome": "answered",
    }
    said = [values(span.attributes) for span in chats]
    assert [one["gen_ai.response.id"] for one in said] == [turn.id for turn in turns]
    assert [one["gen_ai.usage.output_tokens"] for one in said] == [
        len(turn.output_ids) for turn in turns
    ]
    assert said[0]["gen_ai.usage.input_tokens"] == len(turns[0].added_ids)
    assert said[1]["gen_ai.usage.input_tokens"] == turns[1].shared_len + len(turns[1].added_ids)
    assert {tuple(one["agentrl.policy.versions"]) for one in said} == {(3,)}
    assert said[0] | {"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy"} == said[0]
    assert [one["gen_ai.response.finish_reasons"] for one in said] == [
        ["tool_calls"],
        ["tool_calls"],
        ["stop"],
    ]
    asked = [values(span.attributes) for span in looks]
    assert [one["gen_ai.tool.call.id"] for one in asked] == ["call_0_0", "call_1_0"]
    assert [one.get("error.type") for one in asked] == [None, "tool_error"]
    assert values(scored.attributes)["gen_ai.evaluation.score.value"] == 1.0
    assert scored.events[0].name == "gen_ai.evaluation.result"
    # What the MCP server got in `_meta`: the trace, and a span of the call.
    logged = tool_log.read_text().splitlines()[num_calls:]
    parents = [line.rpartition(" ")[2].rpartition("-")[0] for line in logged]
    assert parents == [f"00-{span.trace_id.hex()}-{span.span_id.hex()}" for span in looks]


@pytest.mark.parametrize("show_content", [False, True])
async def test_texts_leave_the_process_only_where_they_are_asked_for(
    store: TrajectoryStore, renderer: Renderer, tools_url: str, show_content: bool
) -> None:
    found = await traced_attempt(store, renderer, tools_url, *REPLIES, show_content=show_content)
    assert (SECRET.encode() in found.wire) is show_content
    assert (b"no such key" in found.wire) is show_content
    if show_content:
        first = values(found.named("chat")[0].attributes)
        assert TASK.query in first["gen_ai.input.messages"]
        assert '"role": "assistant"' in first["gen_ai.output.messages"]


async def test_an_error_is_told_by_its_type_and_not_by_its_words(
    store: TrajectoryStore, renderer: Renderer, tools_url: str
) -> None:
    scoring = ExactScoring(outages=1)
    found = await traced_attempt(store, renderer, tools_url, "<answer>7</answer>", scoring=scoring)
    (scored,), (rollout,) = found.named("evaluate"), found.named("invoke_agent")
    for span in (scored, rollout):
        assert values(span.attributes)["error.type"] == "ScoringError"
        assert (span.status.code, span.status.message) == (span.status.STATUS_CODE_ERROR, "")
    assert b"the judge is away" not in found.wire


def test_an_address_that_is_none_is_refused_and_a_password_in_one_is_hidden() -> None:
    with pytest.raises(ConfigError, match=r"expected an address such as http://127\.0\.0\.1:4318"):
        build_config({"otlp_endpoint": "localhost:4318"})
    config = build_config({"otlp_endpoint": f"http://me:{SECRET}@127.0.0.1:4318"})
    assert SECRET not in repr(config)


def test_a_missing_package_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    none: dict[str, list[str]] = {name: [] for name in extras.EXTRAS}
    monkeypatch.setattr(extras, "missing_packages", lambda: none | {"otel": ["opentelemetry-sdk"]})
    config = build_config({"otlp_endpoint": "http://127.0.0.1:4318"})
    with pytest.raises(
        ConfigError, match=r"opentelemetry-sdk not installed, required for --otlp_endpoint: pip"
    ):
        extras.check_extras(config)
    extras.check_extras(build_config({}))
