"""A run among neighbours: another user of the machine, and a tool server that a model controls.

The run is the demo's, with planted secrets. Another user tries what any process of the machine can;
afterwards every artefact is searched.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from pymongo import MongoClient
from support.demo_run import ROOT, database_uri, logs, run_command
from support.patience import PATIENCE

from agentrl.store.private_mongod import EmbeddedMongo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="drops privileges, which only root can"),
]

NOBODY = 65534
PLANTED = {
    "AGENTRL_API_KEY": "plant-01-data-key",
    "AGENTRL_ADMIN_KEY": "plant-02-admin-key",
    "MCP_SERVER_TOKEN": "plant-03-mcp-token",
    "WANDB_API_KEY": "plant-04-of-the-user",
    "AWS_SESSION_TOKEN": "plant-05-of-the-user",
}
IN_THE_COMMAND = "plant-06-in-the-command"
# A neighbour has a copy of the addresses, which are no secret, and a Python of its own.
NEIGHBOUR = r"""
import json, os, re, signal, socket, sys, urllib.error, urllib.request
ports, pids, folders, uri = json.loads(sys.stdin.read())
won = []
def note(what, detail=""):
    won.append(f"{what} {detail}")
for pid in pids:
    for part in ("environ", "mem", "maps", "fd", "cwd", "root"):
        path = f"/proc/{pid}/{part}"
        try:
            if part in ("cwd", "root"):
                os.readlink(path)
            elif part == "fd":
                os.listdir(path)
            else:
                with open(path, "rb") as file:
                    file.read(1)
        except OSError:
            continue
        note("read", path)
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if b"plant-" in file.read() :
            note("argument", pid)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(pid, number)
        except PermissionError:
            continue
        note("signal", pid)
for folder in folders:
    for root, _, files in os.walk(folder):
        for name in files:
            for mode in (os.O_RDONLY, os.O_WRONLY):
                try:
                    os.close(os.open(os.path.join(root, name), mode))
                except OSError:
                    continue
                note("open", os.path.join(root, name))
    try:
        os.mkdir(os.path.join(folder, "mine"))
        note("mkdir", folder)
    except OSError:
        pass
ROUTES = [
    ("GET", "/model_info"), ("GET", "/get_model_info"), ("GET", "/server_info"), ("GET", "/metrics"),
    ("GET", "/v1/models"), ("POST", "/generate"), ("POST", "/v1/chat/completions"),
    ("POST", "/pause_generation"), ("POST", "/continue_generation"), ("POST", "/flush_cache"),
    ("POST", "/update_weights_from_disk"), ("POST", "/update_weight_version"),
    ("POST", "/abort_request"), ("POST", "/release_memory_occupation"),
    ("GET", "/openapi.json"), ("GET", "/docs"),
]
for port, program in ports:
    for method, route in ROUTES:
        for headers in ({}, {"Authorization": "Bearer guessed"}, {"Authorization": "Bearer "}):
            headers = {"Content-Type": "application/json", **headers}
            body = b"{}" if method == "POST" else None
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{route}", body, headers, method=method
            )
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    text = answer.read(300)
            except (OSError, ValueError):
                continue
            note("http", f"{program} {method} {route} {headers.get('Authorization')} {text!r}")
sys.path[:0] = json.loads(os.environ["PATHS"])
try:
    from pymongo import MongoClient
    client = MongoClient(uri, serverSelectionTimeoutMS=3000)
    note("mongod", client.list_database_names())
except Exception as error:
    if "requires authentication" not in str(error).lower():
        note("mongod said", error)
print(json.dumps(won))
"""


def as_nobody(*given: object) -> list[str]:
    done = subprocess.run(
        ["/usr/bin/env", "-i", f"PATHS={json.dumps(sys.path)}", "python3", "-I", "-c", NEIGHBOUR],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        timeout=120,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    won: list[str] = json.loads(done.stdout)
    return won


class Found:
    """What was seen while the run went on, and where it left its files."""

    def __init__(self, folder: Path, won: list[str], tools: dict[str, dict[str, str]]) -> None:
        self.folder = folder
        self.won = won
        self.tools = tools


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    folder = tmp_path_factory.mktemp("neighbours")
    for parent in (folder, *folder.parents[:3]):
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)  # what a run protects, it protects by itself
    config = yaml.safe_load((ROOT / "assets/demo/grpo.yaml").read_text())
    server = f"{sys.executable} {ROOT}/examples/shop/server.py --port {{port}}"
    config["tool_server_command"] = f"sh -c 'exec {server}' --token {IN_THE_COMMAND}"
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o600)
    with (folder / "run.out").open("wb") as output:
        process = subprocess.Popen(
            run_command(folder, config=path, max_steps=12),
            cwd=ROOT,
            env=os.environ | PLANTED,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + PATIENCE
        while not is_training(folder):
            assert process.poll() is None, logs(folder)
            assert time.monotonic() < deadline, logs(folder)
            time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        ports = [
            (connection.laddr.port, "mongod" if one.name() == "mongod" else " ".join(one.cmdline()))
            for one in family
            for connection in one.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(ports) >= 3
        address = re.sub(r"//[^@/]*@", "//", database_uri(folder)).partition("?")[0]
        # The tool server's own arguments are its own affair.
        pids = [one.pid for one in family if IN_THE_COMMAND not in " ".join(one.cmdline())]
        assert len(pids) >= 5
        tools = {
            str(one.pid): one.environ()
            for one in family
            if "shop/server.py" in " ".join(one.cmdline())
        }
        http = [(port, name) for port, name in ports if name != "mongod"]
        folders = [str(folder / name) for name in ("output", "logs", "mongo")]
        won = as_nobody(http, [process.pid, *pids], folders, address)
        assert process.wait(180) == 0, logs(folder)
        yield Found(folder, won, tools)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def is_training(folder: Path) -> bool:
    log = folder / "logs/short_train_0.log"
    return log.exists() and "version 1 published" in log.read_text()


def test_another_user_reads_alters_stops_and_impersonates_nothing(run: Found) -> None:
    tool_servers = [line for line in run.won if "shop/server.py" in line]
    assert [line for line in run.won if line not in tool_servers] == []


def test_planted_secrets_are_in_no_artefact_but_their_owners_own_file(run: Found) -> None:
    secrets = [text.encode() for text in (*PLANTED.values(), IN_THE_COMMAND)]
    texts = {
        str(path): path.read_bytes()
        for path in run.folder.rglob("*")
        if path.is_file() and path.name not in ("mine.yaml", "config.secrets.yaml")
    }
    with (
        EmbeddedMongo(run.folder / "mongo") as mongo,
        MongoClient[dict[str, Any]](mongo.uri("short")) as client,
    ):
        database = client.get_default_database()
        for name in set(database.list_collection_names()) - {"system.views"}:
            texts[name] = repr(list(database[name].find())).encode()
    assert {"runs", "turns", "records"} <= set(texts)
    assert [name for name, text in texts.items() if any(one in text for one in secrets)] == []


def test_a_tool_server_has_none_of_them_in_its_environment(run: Found) -> None:
    assert run.tools
    for environment in run.tools.values():
        assert not set(PLANTED) & set(environment)
        assert not [text for text in environment.values() if "plant-" in text]
