"""Environments and agents, with their real packages, from the task to a gradient step.

The ids that the engine was sent and drew are those that the store has, and those that were trained.
AWorld's agents have a run of their own (`test_aworld_agents`).
"""

import asyncio
import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness.processes import listening_process
from support.agent_venvs import index_variables, python_with
from support.demo_run import ROOT, RUN_NAME, logs, run_command
from support.harbor import write_task

from agentrl.data import TokenTree
from agentrl.schema import DBRecordData, rebuild_prompts
from agentrl.store import TrajectoryStore
from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PACKAGES = ROOT / "benchmarks/harness/environments"
OPENENV_SERVER = ROOT / "tests/support/environments/openenv_server.py"
GROUPS, TRIES = 2, 2
ENDLESS = "samplers_and_endless_tasks"
ENVIRONMENTS = {
    "reasoning_gym": "reasoning_gym:leg_counting?size=4&max_animals=3",
    "textarena": "textarena:GuessTheNumber-v0?size=4&max_number=3",
    "openenv": "openenv:{url}?size=4",
    "verifiers": "verifiers:sums_taskset?size=4",
    "harbor": "harbor:{folder}?runtime=process",
}
PROGRAMS = {"mini_by_chat": "openai", "mini_by_messages": "anthropic"}
"""mini-swe-agent over two dialects."""
AGENTS = ("agents_sdk", "langgraph", "anthropic")
"""Those of `examples/agents`."""
SCORER = '''
from agentrl.rewards import MCPScorerFactory


@MCPScorerFactory.register_scorer("half", sees_group=True)
def half(records, truth):
    """Something that the tries of a model that knows nothing differ in."""
    return [float(record.traj_id % 2) for record in records]
'''


SAMPLERS = """
import itertools

from agentrl.rollout import (
    AsyncSampler, Conversation, RolloutResult, register_sampler, register_task_type
)
from agentrl.schema import Task


@register_task_type
class SumTask(Task):
    kind = "sum"
    number: int


@register_sampler(SumTask)
class SumSampler(AsyncSampler[SumTask]):
    async def run(self):
        asked = [{"role": "user", "content": f"{self.task.number} + 1 = ?"}]
        _, reply = await self.generate(Conversation(asked))
        return RolloutResult("answered", reply.content)

    async def evaluate_record(self, result):
        return float(self.record.traj_id % 2)


def train_tasks(seed):
    for number in itertools.count():
        yield SumTask(id=f"train/0/{number}", number=number)
"""


@dataclass(frozen=True)
class Kind:
    """What plays, as flags and further variables."""

    flags: dict[str, object]
    variables: dict[str, str] = field(default_factory=dict)


@contextmanager
def environment(kind: str, folder: Path) -> Iterator[Kind]:
    flags: dict[str, object] = {"env_scorer": "half", "train_file": "none"}
    if kind == "harbor":
        for name in "abcd":
            write_task(folder / "tasks" / name)
        yield Kind({**flags, "env": ENVIRONMENTS[kind].format(folder=folder / "tasks")})
        return
    python = python_with(kind)
    flags["env_python"] = python
    if kind == "openenv":
        server: list[str | Path] = [python, OPENENV_SERVER, "{port}", "4"]
        with listening_process(server) as url:
            yield Kind({**flags, "env": ENVIRONMENTS[kind].format(url=url)})
    elif kind == "verifiers":
        yield verifiers_of({**flags, "env": ENVIRONMENTS[kind]}, PACKAGES)
    else:
        yield Kind({**flags, "env": ENVIRONMENTS[kind]})


def verifiers_of(flags: dict[str, object], packages: Path) -> Kind:
    """Return a task set for verifiers, which is found in a folder."""
    python = python_with("verifiers")
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    variables = index_variables(python) | {"PYTHONPATH": path}
    return Kind({**flags, "env_python": python, "env_variables": ",".join(variables)}, variables)


def program(kind: str, folder: Path) -> dict[str, object]:
    """Return mini-swe-agent as a user calls it; a model that knows nothing runs into its limits."""
    (folder / "short.yaml").write_text("agent: {instance_template: '{{task}}'}\n")
    settings = (
        "MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True "
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT=1"
    )
    mini = (
        f'{python_with("mini").parent}/mini -t "$0" -m {PROGRAMS[kind]}/{{model}} '
        f"--model-class litellm -c mini.yaml -c {folder}/short.yaml -y --exit-immediately -o run.json"
    )
    command = f"env {settings} sh -c {shlex.quote(mini)} {{query}}"
    return {"agent_command": command, "max_prompt_tokens": 1900, "max_turns": 2}


def agent(kind: str, folder: Path) -> Kind:
    if kind == ENDLESS:
        (folder / "samplers.py").write_text(SAMPLERS)
        return Kind({"train_file": "none", "sampler_module": folder / "samplers.py"})
    questions = folder / "questions.jsonl"
    rows = [{"query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(4)]
    questions.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags: dict[str, object] = {"train_file": questions, "default_scorer": "half"}
    if kind in PROGRAMS:
        return Kind({**flags, **program(kind, folder)})
    return Kind({**flags, "agent": f"{ROOT}/examples/agents/train_{kind}.py:play"})


async def run(kind: Kind, folder: Path) -> None:
    (folder / "scorers.py").write_text(SCORER)
    flags: dict[str, object] = {
        "eval_file": "none",
        "tool_server_command": "none",
        "scorer_module": folder / "scorers.py",
        "inference_request_log": folder / "requests.jsonl",
        "groups_per_step": GROUPS,
        "num_generations": TRIES,
        "max_steps": 1,
        "max_turns": 4,
        "max_new_tokens": 16,
        "temperature": 2.0,  # tries that say the same cancel out
        "drop_zero_advantage": 0,  # a call that cannot be parsed, as one drawn at random, has none
        "verify_merge": 1,
    }
    done = await asyncio.to_thread(
        subprocess.run,
        run_command(folder, **flags | kind.flags),
        capture_output=True,
        text=True,
        env=os.environ | kind.variables,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr + logs(folder)


@pytest.mark.parametrize("kind", [*ENVIRONMENTS, *AGENTS, *PROGRAMS, ENDLESS])
async def test_the_ids_of_the_engine_are_recorded_and_trained(kind: str, tmp_path: Path) -> None:
    if kind in ENVIRONMENTS:
        with environment(kind, tmp_path) as given:
            await run(given, tmp_path)
    else:
        await run(agent(kind, tmp_path), tmp_path)
    (step,) = map(json.loads, (tmp_path / "output/metrics.jsonl").read_text().splitlines())
    assert step["grad_norm"] > 0
    assert step["merge_error"] <= 1e-4
    engines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    sent = {(tuple(one["input_ids"]), tuple(one["output_ids"])) for one in engines}
    trained: dict[str, int] = {}
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME), RUN_NAME) as store:
            async for used in store.database["turn_training"].find({"step": 1}):
                trained[used["turn_id"]] = used["num_trained_tokens"]
            records = [one async for one in store.ledger.find(status="trained", hydrate=True)]
            assert await store.tasks.count() <= 8
    assert len(records) == GROUPS * TRIES
    num_ids = 0
    for data in records:
        for turn, prompt in zip(data.turns, rebuild_prompts(data.turns), strict=True):
            assert (tuple(prompt.tolist()), tuple(turn.output_ids.tolist())) in sent
            assert trained[turn.id] == len(turn.output_ids) > 0
            num_ids += len(turn.output_ids)
        own_ids = sum(len(turn.output_ids) for turn in data.turns)
        assert TokenTree.from_turns(data.turns).num_targets == own_ids
    assert sum(trained.values()) == num_ids
    scorers = {data.score.scorer for data in records if data.score is not None}
    assert scorers == {"SumSampler" if kind == ENDLESS else "half"}


async def test_every_seat_is_trained_on_what_it_earned_in_its_own_branch(tmp_path: Path) -> None:
    """Two players who speak at once and a referee who is not trained, of verifiers' own package."""
    flags: dict[str, object] = {
        "env": "verifiers:duel_taskset?size=4",
        "train_file": "none",
        "sign_clip": 0,
        "adv_scaling": 1.0,
    }
    await run(verifiers_of(flags, ROOT / "tests/support/environments"), tmp_path)
    (step,) = map(json.loads, (tmp_path / "output/metrics.jsonl").read_text().splitlines())
    assert step["grad_norm"] > 0
    assert step["merge_error"] <= 1e-4
    engines = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    sent = {(tuple(one["input_ids"]), tuple(one["output_ids"])) for one in engines}
    with EmbeddedMongo(tmp_path / "mongo") as mongo:
        async with TrajectoryStore.connect(mongo.uri(RUN_NAME), RUN_NAME) as store:
            used = {
                one["turn_id"]: one
                async for one in store.database["turn_training"].find({"step": 1})
            }
            groups: dict[str, list[DBRecordData]] = {}
            async for data in store.ledger.find(status="trained", hydrate=True):
                groups.setdefault(data.task_id, []).append(data)
                record = await store.records.get(data.record_id)
                assert record is not None
                assert data.score is not None
                assert data.score.scorer == "verifiers:duel_taskset"
                rewards = {turn.seat.name: turn.seat.reward for turn in data.turns if turn.seat}
                left, right = record.metrics["reward_left"], record.metrics["reward_right"]
                assert rewards == {"left": left, "right": right, "referee": None}
                assert data.score.value == pytest.approx((left + right) / 2)
    assert sorted(map(len, groups.values())) == [TRIES] * GROUPS
    for pair in groups.values():
        for mine, other in (pair, pair[::-1]):
            theirs = {turn.seat.name: turn.seat.reward for turn in other.turns if turn.seat}
            for turn, prompt in zip(mine.turns, rebuild_prompts(mine.turns), strict=True):
                assert (tuple(prompt.tolist()), tuple(turn.output_ids.tolist())) in sent
                assert turn.seat is not None
                parent = None if turn.parent is None else mine.turns[turn.parent]
                assert parent is None or parent.seat == turn.seat
                training = used[turn.id]
                if turn.seat.name == "referee":
                    assert training["num_trained_tokens"] == 0
                    assert training["masked"] == {"untrained_seat": len(turn.output_ids)}
                    continue
                assert training["num_trained_tokens"] == len(turn.output_ids) > 0
                assert turn.seat.reward is not None
                # Leave-one-out of two: what this seat earned more than in the other try.
                ahead = turn.seat.reward - (theirs[turn.seat.name] or 0.0)
                assert training["advantage"] == pytest.approx(ahead)
