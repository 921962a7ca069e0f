"""Scorers that take `rollout`: what was done, and what the tools say of the world that it left."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.scripted_engine import replies, serve_script
from support.play import begin_run, claim, open_play, tool_call

from agentrl.errors import ScorerDefect
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import MCPScorerFactory, RegisteredScoring, load_scorer_module
from agentrl.rewards.rescore import rescore
from agentrl.rollout import MCPSampler
from agentrl.schema import MCPTask, Score
from agentrl.store import TrajectoryStore
from agentrl.tools import load_mcp_servers
from agentrl.tools.mcp_toolbox import connect_tools
from agentrl.tools.servers.server_config import ToolsConfig

SERVER = '''
from pathlib import Path
from mcp.server.mcpserver import MCPServer

server = MCPServer("issues")


@server.tool()
def close(issue: int) -> str:
    """Close an issue."""
    path = Path(f"{issue}.open")
    if not path.exists():
        raise ValueError("no such issue")
    path.unlink()
    return "closed"


@server.tool()
def is_open(issue: int) -> bool:
    """Return whether an issue is open."""
    return Path(f"{issue}.open").exists()


server.run("stdio")
'''
SCORERS = '''
import sqlite3
from agentrl.rewards import MCPScorerFactory, Verdict


@MCPScorerFactory.register_scorer("closed")
async def closed(answer, truth, rollout):
    """The issue that was meant is closed, and no other one."""
    mine = await rollout.call("is_open", issue=truth.columns["issue"])
    rest = sorted(path.name for path in rollout.folder.glob("*.open"))
    value = float(mine.content == "false" and rest == truth.columns["rest"])
    detail = f"{answer}: {[(c.tool, c.arguments, c.result) for c in rollout.calls]}"
    return Verdict(value, detail=detail, parts={"turns": len(rollout.messages)})


@MCPScorerFactory.register_scorer("asked")
async def asked(answer, truth, rollout):
    """The same, from what the tools say alone, behind an exception handler of its own."""
    try:
        states = [(await rollout.call("is_open", issue=n)).content for n in (16, 17)]
    except Exception:
        states = ["caught"]
    return float(states == ["true", "false"])


@MCPScorerFactory.register_scorer("misspelled")
async def misspelled(answer, truth, rollout):
    return float((await rollout.call("isopen", issue=17)).content == "false")


@MCPScorerFactory.register_scorer("no_calls")
def no_calls(answer, truth, rollout):
    assert rollout.outcome == "answered", rollout.outcome
    return 1.0 if not rollout.calls else 0.0
'''


@pytest.fixture
def scoring(tmp_path: Path) -> Iterator[RegisteredScoring]:
    before = dict(MCPScorerFactory._scorers)
    path = tmp_path / "tracker_scorers.py"
    path.write_text(SCORERS)
    load_scorer_module(path)
    yield RegisteredScoring()
    MCPScorerFactory._scorers.clear()
    MCPScorerFactory._scorers.update(before)


@pytest.fixture
def tracker(tmp_path: Path) -> ToolsConfig:
    path = tmp_path / "tracker.py"
    path.write_text(SERVER)
    server = {
        "command": sys.executable,
        "args": [str(path)],
        "cwd": "${rollout_dir}",
        "per_rollout": True,
        "state": "folder",
        "fixture": "${row.fixture}",
    }
    return ToolsConfig(servers=load_mcp_servers({"tracker": server}))


Judge = Callable[..., Any]


@pytest.fixture
def judge(
    store: TrajectoryStore,
    renderer: Renderer,
    scoring: RegisteredScoring,
    tracker: ToolsConfig,
    tmp_path: Path,
) -> Judge:
    """Plays replies on the tracker, and returns the score, or raises why there is none."""
    (tmp_path / "first").mkdir()
    for issue in (16, 17):
        (tmp_path / "first" / f"{issue}.open").touch()

    async def judged(scorer: str, *texts: str) -> Score:
        task = MCPTask(
            id="train/0/q1",
            query="Close issue 17.",
            answer="done",
            scorer=scorer,
            columns={"fixture": "first", "issue": 17, "rest": ["16.open"]},
        )
        with serve_script(renderer, replies(*texts)) as engine:
            await begin_run(store, engine, task)
            async with open_play(store, engine, None) as context:
                record, claimed = await claim(store)
                folders = {"train": tmp_path}
                example = context.served_question(task, "")
                example = replace(example, folder=tmp_path)
                config = tracker.model_copy(update={"example": example})
                async with connect_tools(config) as toolbox:
                    own = replace(
                        context, toolbox=toolbox, scoring=scoring, question_folders=folders
                    )
                    sampler = MCPSampler(claimed, record, own)
                    result = await sampler.run()
                await sampler.finish()
                await store.records.finish(
                    record.id,
                    record.fence,
                    outcome=result.outcome,
                    final_answer=result.final_answer,
                    reward=None,
                    metrics={},
                    lease_seconds=60.0,
                )
                score = await sampler.evaluate_record(result)
                await store.scores.set(record.id, record.fence, score)
                return score

    return judged


ANSWER = "<answer>done</answer>"


@pytest.mark.parametrize(
    ("texts", "value"),
    [
        ((tool_call("close", issue=17), ANSWER), 1.0),
        ((ANSWER,), 0.0),
        ((tool_call("close", issue=16), tool_call("close", issue=17), ANSWER), 0.0),
        ((tool_call("close", issue=17), "no", "no", "no"), 1.0),
    ],
    ids=["closes it", "says so", "closes another one, too", "gives no answer"],
)
async def test_the_state_that_a_rollout_left_is_scored(
    judge: Judge, texts: tuple[str, ...], value: float
) -> None:
    score = await judge("closed", *texts)
    assert score.value == value
    (fact,) = score.inputs["world"]
    assert (fact["call"], fact["arguments"]) == ("is_open", {"issue": 17})
    if len(texts) == 2:
        assert score.detail == "done: [('close', {'issue': 17}, 'closed')]"
        assert score.parts == {"turns": 4.0}


async def test_a_later_scoring_repeats_what_the_tools_said_or_says_what_it_lacks(
    judge: Judge, store: TrajectoryStore
) -> None:
    assert (await judge("asked", tool_call("close", issue=17), ANSWER)).value == 1.0
    asked = MCPScorerFactory.get_scorer("asked")
    again = await rescore(store, replace(asked, version="2"))
    (record,) = [record async for record in store.records.find()]
    scored = record.score_of("asked", "2")
    assert (again.num_scored, scored and scored.value) == (1, 1.0)
    counts = await rescore(store, MCPScorerFactory.get_scorer("closed"))
    assert counts.num_undecided == 1
    assert counts.reasons[0].endswith(
        "asks the rollout's tools 'is_open' where they were asked 'is_open' before; a scorer must ask "
        "the same in the same order"
    )


async def test_a_world_that_is_gone_is_named(judge: Judge, store: TrajectoryStore) -> None:
    await judge("no_calls", ANSWER)
    counts = await rescore(store, MCPScorerFactory.get_scorer("closed"))
    assert counts.reasons == [
        "train/0/q1/0: the scorer calls 'is_open' of the rollout's tools, which ended with the rollout"
    ]


async def test_a_tool_that_no_server_has_is_a_defect_of_the_scorer(judge: Judge) -> None:
    with pytest.raises(ScorerDefect, match=r"'isopen', which no .* \(available: close, is_open"):
        await judge("misspelled", ANSWER)


async def test_a_function_may_look_at_the_calls_alone(judge: Judge) -> None:
    assert (await judge("no_calls", ANSWER)).value == 1.0


async def test_an_assertion_of_a_function_is_a_defect_of_it(judge: Judge) -> None:
    with pytest.raises(ScorerDefect, match="AssertionError: turns_limit"):
        await judge("no_calls", *[tool_call("is_open", issue=17)] * 30)
