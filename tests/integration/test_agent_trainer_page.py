"""Every code block of docs/agent-trainer.md, run in its order in an empty directory."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.demo_run import ROOT

from agentrl.plugins.integrations.agent_worker.describe import describe
from agentrl.plugins.integrations.agent_worker.description import worker_settings
from agentrl.plugins.integrations.agent_worker.engine_session import EngineAgent, EngineReply
from agentrl.plugins.integrations.agent_worker.worker_pool import AgentWorkerPool
from agentrl.schema import MCPTask, Message

BLOCK = re.compile(r"^```(python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    page = (ROOT / "docs/agent-trainer.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(page)
    assert len(blocks) == page.count("```python") + page.count("```yaml")
    for _, name, text in blocks:
        (folder / name).write_text(text)
    return folder


def run(folder: Path, script: str) -> str:
    done = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_an_engine_of_ones_own_trains_and_answers(folder: Path) -> None:
    assert run(folder, "use_my_engine.py") == "worth: {'19': 0.25, '20': 0.0} held out: 0.25\n"
    assert (folder / "runs/best.txt").read_text() == "19"


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs agentrl-mongo[trl]")
def test_the_configuration_for_trl_is_taken_as_it_stands(folder: Path) -> None:
    script = (folder / "train.py").read_text()
    config = 'config="train_with_trl.yaml", train_engine_name="trl"'
    made = script.replace('config="train.yaml"', config).replace("runs/stock", "runs/trl")
    (folder / "make_only.py").write_text(made.partition("    trainer.train()")[0])
    run(folder, "make_only.py")
    arguments = json.loads((folder / "runs/trl/trl.json").read_text())
    assert (arguments["beta"], arguments["num_generations"]) == (0.04, 8)


@pytest.mark.parametrize(
    ("name", "package"), [("sdk_agent", "agents"), ("graph_agent", "langgraph")]
)
async def test_agents_of_other_frameworks_use_their_tools_and_answer(
    folder: Path, name: str, package: str
) -> None:
    pytest.importorskip(package)

    async def model(messages: list[Message], tools: list[dict[str, Any]]) -> EngineReply:
        assert [tool["function"]["name"] for tool in tools] == ["stock"]
        if messages[-1]["role"] == "user":
            return EngineReply("", (("stock", '{"item": "honey"}'),))
        return EngineReply(f"<answer>{messages[-1]['content']}</answer>")

    description, _ = describe(f"{folder / name}.py:{name}")
    agent = EngineAgent(AgentWorkerPool(worker_settings(description, 1)))
    try:
        answer = await agent.run(MCPTask(id="t", query="honey: packs?"), model)
    finally:
        await agent.close()
    assert answer == "<answer>13</answer>"


@pytest.mark.slow
def test_three_steps_lead_from_an_agent_to_a_training_run(folder: Path) -> None:
    printed = run(folder, "train.py")
    assert re.search(r"mean reward: [01]\.\d+\n", printed)
    summary = json.loads((folder / "runs/stock/output/summary.json").read_text())
    assert summary["status"] == "completed"
    assert 0.0 < summary["reward_mean"][0] < 1.0
