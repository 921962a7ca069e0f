"""An agent program nobody changed, mini-swe-agent, as a process of its own in every dialect."""

import shlex
from pathlib import Path

import pytest
from harness.scripted_engine import replies, serve_script
from support.agent_venvs import python_with
from support.agents import assert_prompts_as_sent, open_stage
from support.play import begin_run, tool_call

from agentrl.config.sections import AgentSection, RolloutSection, RootConfig
from agentrl.data import TokenTree
from agentrl.renderers.renderer import Renderer
from agentrl.rollout import RolloutResult
from agentrl.rollout.agent import configured_agent
from agentrl.schema import MCPTask
from agentrl.store import TrajectoryStore

pytestmark = pytest.mark.slow

MODEL_DIR = Path(__file__).parents[2] / "assets/demo/model"
TASK = MCPTask(id="train/0/q1", query="Don't guess: what is 3 + 4?", answer="7")
LOOK = f"Let me see.\n{tool_call('bash', command='echo $((3 + 4)) > seven; cat seven')}"
SUBMIT = (
    f"Done.\n{tool_call('bash', command='echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat seven')}"
)
SUBMISSION = "import json; print(json.load(open('run.json'))['info']['submission'])"


@pytest.mark.parametrize(
    ("provider", "model_class"),
    [("openai", "litellm"), ("openai", "litellm_response"), ("anthropic", "litellm")],
)
async def test_every_id_that_the_engine_drew_for_an_unchanged_program_is_trained(
    store: TrajectoryStore, provider: str, model_class: str
) -> None:
    renderer = Renderer.load(MODEL_DIR)
    python = python_with("mini")
    mini = f'{python.parent}/mini -t "$0" -m {provider}/{{model}} --model-class {model_class}'
    shell = (
        f"{mini} -y --exit-immediately -o run.json > run.log 2>&1 || {{ tail run.log >&2; exit 1; }};"
        f" {python} -c {shlex.quote(SUBMISSION)}"
    )
    settings = (
        "MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True"
    )
    command = f"env {settings} sh -c {shlex.quote(shell)} {{query}}"
    agent = configured_agent(RootConfig(agents=AgentSection(agent_command=command)))
    with serve_script(renderer, replies(LOOK, SUBMIT)) as engine:
        await begin_run(store, engine, TASK)
        limits = RolloutSection(rollout_timeout_seconds=100)
        async with open_stage(store, engine, rollout=limits) as stage:
            result, turns = await stage.play(agent)
    assert result == RolloutResult("answered", "7")
    sent = [body["input_ids"] for body in engine.requests]
    assert_prompts_as_sent(turns, sent)
    drawn = [engine.reply_ids(LOOK), engine.reply_ids(SUBMIT)]
    assert [turn.output_ids.tolist() for turn in turns] == drawn
    assert TokenTree.from_turns(turns).num_targets == sum(map(len, drawn))
