"""What a person should know before a run starts that is no mistake."""

import asyncio
import json
import socket
from pathlib import Path

import pytest

from agentrl.config.loading import load_config
from agentrl.errors import ConfigError
from agentrl.launcher.checks import preflight
from agentrl.launcher.checks.preflight import check_inputs, findings


async def test_questions_that_end_early_and_keys_that_nothing_reads_are_noted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"id": f"{n}", "query": "Q", "anwser": n} for n in range(10)]
    path.write_text("\n".join(json.dumps(line | {"scorer": "told"}) for line in lines))
    scorers = tmp_path / "scorers.py"
    scorers.write_text(
        "from agentrl.rewards import MCPScorerFactory\n"
        "MCPScorerFactory.register_scorer('told')(lambda answer, truth: 1.0)\n"
    )
    given = {"train_file": str(path), "scorer_module": str(scorers), "groups_per_step": 4}
    assert await check_inputs(load_config(given)) == [
        f"ignored keys in {path}: anwser (did you mean answer?)"
    ]
    notes = await check_inputs(load_config(given | {"max_steps": 9}))
    assert notes[1] == (
        "--max_steps 9: 10 question(s) last for at most 3 step(s) of 4; repeat them with "
        "--num_train_epochs 4"
    )
    assert len(await check_inputs(load_config(given | {"max_steps": 3}))) == 1


async def test_tools_beside_an_agent_are_noted(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    (tmp_path / "own.py").write_text("async def play(task, endpoint):\n    return ''\n")
    command = "python examples/shop/server.py --port {port}"
    given = {
        "train_file": str(tmp_path / "q.jsonl"),
        "agent": f"{tmp_path}/own.py:play",
        "tool_server_command": command,
    }
    (note,) = await check_inputs(load_config(given))
    assert note.startswith("the agent uses its own tools")


async def test_held_out_questions_that_are_trained_on_are_noted(tmp_path: Path) -> None:
    for name in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    files = {"train_file": f"{tmp_path}/train.jsonl", "eval_file": f"{tmp_path}/held_out.jsonl"}
    (note,) = await check_inputs(load_config(files))
    assert note.startswith("--eval_file holds the training questions")


async def test_a_question_beyond_the_longest_prompt_and_scorers_without_a_name_are_noted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"query": query, "answer": 1, "scorer": "exact"} for query in ("Q", "word " * 500)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "scorers.py").write_text("def mine(answer, truth):\n    return 1.0\n")
    flags = {"scorer_module": str(tmp_path / "scorers.py"), "max_prompt_tokens": 400}
    unnamed, long = await check_inputs(load_config({"train_file": str(path), **flags}))
    assert unnamed.startswith(
        f"--scorer_module {tmp_path}/scorers.py registers no scorer; decorate its function with "
        "@MCP"
    )
    assert long.startswith(f"{path}: a question has ")
    assert long.endswith(": its rollouts end without an answer")


async def test_a_run_that_starts_no_sampler_says_how_one_joins(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    given = {"train_file": str(tmp_path / "q.jsonl"), "num_samplers": 0, "output_dir": tmp_path}
    (note,) = await check_inputs(load_config(given))
    assert note == (
        "--num_samplers 0: sampling starts when a sampler joins: agentrl sample --config "
        f"{tmp_path}/config.yaml"
    )


async def test_a_metrics_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"query": "Q", "answer": 1, "scorer": "exact"}')
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        # The first sampler's.
        given = {"train_file": str(tmp_path / "q.jsonl"), "metrics_port": port - 1}
        with pytest.raises(ConfigError, match=f"^--metrics_port {port - 1}: port {port} is in use"):
            await check_inputs(load_config(given))


async def test_an_interruption_during_a_check_ends_the_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subjects: list[str] = []
    note = subjects.append

    async def check() -> None:
        async for found in findings(load_config({})):
            note(found.subject)

    checking = asyncio.create_task(check())

    def interrupt(*_: object, **__: object) -> None:
        checking.cancel()

    monkeypatch.setattr(preflight, "check_folders", interrupt)
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert subjects == ["packages", "folders"]
