"""`agentrl doctor`: lines that pass or say what to do."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.config.command_line import parse_flags
from agentrl.config.loading import build_config
from agentrl.config.sections import RootConfig
from agentrl.launcher import doctor
from agentrl.launcher.checks import extras
from agentrl.launcher.doctor import examine

ROOT = Path(__file__).parents[3]
SERVER = ROOT / "tests/support/tool_server.py"

pytestmark = pytest.mark.usefixtures("folder")


def examined(
    capsys: pytest.CaptureFixture[str], *flags: str, status: int
) -> dict[str, list[tuple[str, str]]]:
    assert main(["doctor", "--json", *flags]) == status
    found: dict[str, list[tuple[str, str]]] = {}
    for line in map(json.loads, capsys.readouterr().out.splitlines()):
        found.setdefault(line["subject"], []).append((line["state"], line["text"]))
    return found


def test_a_machine_that_can_train_the_demo_passes(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = {"mine": {"command": sys.executable, "args": [str(SERVER), str(folder / "log")]}}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    found = examined(capfd, "--mcp_servers", "servers.json", status=0)
    assert found["python"][0][0] == "ok"
    assert "engine" in found["packages"][0][1]
    assert found["MongoDB"] == [("ok", found["MongoDB"][0][1])]
    assert "a private mongod starts and accepts writes" in found["MongoDB"][0][1]
    assert found["tools mine"][0][0] == "ok"
    assert "look" in found["tools mine"][0][1]
    for subject in ("disk", "memory", "servers", "model", "questions", "agent"):
        assert {state for state, _ in found[subject]} <= {"ok", "note"}, subject
    assert not (folder / ".agentrl").exists()


def test_what_is_missing_is_said_with_what_to_do(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    smi = bin_folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559, 12'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_folder))
    # A module of that name, as a user's file beside an agent may have, is no SGLang.
    (bin_folder / "sglang.py").touch()
    monkeypatch.syspath_prepend(bin_folder)
    monkeypatch.setenv("MONGOD_BINARY", "/nowhere/mongod")
    servers = {
        "dead": {"url": "http://127.0.0.1:1/mcp"},
        "absent": {"command": "no-such-program"},
    }
    (folder / "servers.json").write_text(json.dumps(servers))
    flags = ["--mcp_servers", "servers.json", "--inference_backend", "sglang", "--num_processes=2"]
    found = examined(capsys, *flags, "--model_name_or_path", "./nowhere", status=1)
    failures = {
        subject: text for subject, told in found.items() for state, text in told if state == "FAIL"
    }
    assert "install a CUDA build of torch" in failures["GPUs"]
    assert "need 3 GPUs, and this machine has 1" in failures["placement"]
    assert "MONGOD_BINARY is /nowhere/mongod" in failures["MongoDB"]
    assert "SGLang is not installed" in failures["servers"]
    assert "127.0.0.1:1/mcp" in failures["tools dead"]
    assert "no-such-program" in failures["tools absent"]
    assert "./nowhere: no such directory" in failures["model"]


def test_a_database_that_refuses_the_login_is_named_without_its_password(
    mongo_uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    login, _, place = mongo_uri.partition("@")
    uri = f"{login.rpartition(':')[0]}:s3cret@{place}"
    assert main(["doctor", "--db_connection_string", uri]) == 1
    text = capsys.readouterr().out
    assert "FAIL  MongoDB" in text
    assert "login" in text
    assert "s3cret" not in text


async def test_a_slow_reader_is_not_taken_for_a_slow_check(mongo_uri: str) -> None:
    config = parse_flags(["--db_connection_string", mongo_uri])
    async for diagnosis in examine(config, check_seconds=2.0):
        if diagnosis.subject == "servers":
            await asyncio.sleep(2.1)
            assert diagnosis.state == "ok"


async def test_a_slow_import_of_torch_is_named(
    mongo_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CHECK_SECONDS", 0.01)
    config = parse_flags(["--db_connection_string", mongo_uri])
    lines = [line async for line in examine(config, 120) if line.subject == "torch"]
    assert [line.state for line in lines] == ["FAIL"]
    assert "`import torch` takes longer than 0 s" in lines[0].text


def test_sources_without_the_distribution_are_examined_and_can_train(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "DISTRIBUTION", "not-installed")
    found = examined(capfd, status=0)
    assert found["packages"] == [("note", found["packages"][0][1])]
    assert "is not installed, only its sources" in found["packages"][0][1]
    extras.check_extras(build_config({}))


async def test_an_interruption_during_the_start_of_mongod_ends_the_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subjects: list[str] = []
    note = subjects.append

    async def check() -> None:
        async for found in examine(build_config({})):
            note(found.subject)

    checking = asyncio.create_task(check())

    async def interrupted(config: RootConfig) -> tuple[str, str]:
        checking.cancel()
        return "ok", ""

    monkeypatch.setattr(doctor, "_database", interrupted)
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert subjects[-1] == "MongoDB"
