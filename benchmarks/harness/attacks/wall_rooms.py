"""Sets the stage for `wall_attacks`, and runs them behind each door of the product.

    with stage(folder) as given:                  plants marks, and starts what lives outside
        found = await DOORS[name](given)          the ways that succeeded behind a door

`bombed` runs the ways that take all memory, disk or processes behind a wall of small bounds.
"""

import asyncio
import ctypes
import json
import os
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from agentrl.config.command_line import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.launcher.cluster.local_cluster import LocalCluster
from agentrl.plugins.environments.harbor_sandboxes import ProcessSandbox
from agentrl.rewards.code_runs import run_python
from agentrl.rollout.agent.agent_command import command_agent
from agentrl.rollout.worker.resources import tools_config, tools_of
from agentrl.runtime.processes import wall_child
from agentrl.runtime.processes.wall import Wall, scratch_directory
from agentrl.schema import MCPTask
from agentrl.schema.agent_endpoint import AgentEndpoint
from agentrl.tools import ToolsConfig, connect_tools
from harness.attacks.wall_attacks import SECRETS, WAYS, Given

_HERE = Path(__file__).parent
PROGRAM, SERVER = _HERE / "wall_attacks.py", _HERE / "wall_server.py"
_OUTSIDE = _HERE / "wall_outside.py"
STRANGER = 65534
"""User and group of the rooms that root does not start."""
SYSTEM_PYTHON = "/usr/bin/python3"
Figures = dict[str, Any]
PATIENCE_SECONDS = 300.0
MEMORY_MIB, DISK_MIB, PROCESSES = 256, 64, 512
"""Bounds behind which bombs are tried."""
_FILES = {
    "question-file": "work/questions.jsonl",
    "git-config": "work/.git/config",
    "scorer-neighbour": "work/scorers/keys.py",
    "servers.json": "work/servers.json",
    "config.yaml": "work/mine.yaml",
    "run-output": "work/output/other/config.secrets.yaml",
    "run-state": "work/.agentrl/state",
    "ui-token": "work/.agentrl/ui-token",
    "database-password": "work/.agentrl/mongo/agentrl-password",
    "dot-env": "work/.env",
    "hub-cache": "home/.cache/huggingface/hub/datasets--openai--gsm8k/blobs/b1",
    "ssh-key": "home/.ssh/id_ed25519.pem",
    "kernel-file": "home/.local/share/jupyter/runtime/kernel-1.json",
    "shell-history": "home/.bash_history",
    "npmrc": "home/.npmrc",
    "pgpass": "home/.pgpass",
    "browser-profile": "home/.mozilla/firefox/p/cookies.sqlite",
}
_ELSEWHERE = {
    "shared-memory-file": "/dev/shm",
    "run-directory-file": "/run",
    "temporary-file": "/tmp",
    "opt-file": "/opt",
    "srv-file": "/srv",
}


@contextmanager
def stage(folder: Path, user: int | None = None) -> Iterator[Given]:
    """Plant marks and start what lives outside, for an owner; yields what an attacker knows.

    While it is set, HOME and the working folder are planted ones, and the environment of this process
    holds a mark.

    Args:
        folder: an empty folder.
        user: who owns it all; this process's user by default.
    """
    with ExitStack() as stack:
        mark = f"wall-plant-{secrets.token_hex(8)}"
        name = f"wall-stage-{secrets.token_hex(4)}"
        paths = {secret: folder / path for secret, path in _FILES.items()}
        for secret, place in _ELSEWHERE.items():
            paths[secret] = Path(place, name, "secret")
            stack.callback(shutil.rmtree, Path(place, name), ignore_errors=True)
        other = stack.enter_context(scratch_directory("agentrl-tools-"))
        paths["other-scratch"] = Path(other, "notes.txt")
        assert paths.keys() == {*SECRETS}
        for secret, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"key": mark}) if secret == "kernel-file" else f"answer: {mark}\n"
            )
        outside, home, work = folder / "outside", folder / "home", folder / "work"
        for made in (outside, folder / "sockets", folder / "agent"):
            made.mkdir()
        (outside / "victim").write_text("mine\n")
        _commit(work, mark)
        owned = (folder, *(Path(place, name) for place in _ELSEWHERE.values()), Path(other))
        if user is not None:
            for one in owned:
                subprocess.run(["chown", "-R", f"{user}:{user}", one], check=True)
        prefix = [] if user is None else _as_user(user)
        sockets = {
            "tmp": f"/tmp/{name}/socket",
            "run": f"/run/{name}/socket",
            "home": str(home / "socket"),
            "shm": f"/dev/shm/{name}/socket",
        }
        told = {
            "sockets": sockets,
            "abstract": f"{name}-stream",
            "datagram": f"{name}-datagram",
            "terminal_log": str(outside / "terminal"),
            "queue": name,
            "ipc_key": secrets.randbits(30),
            "note": mark,
        }
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "SHELL": "/bin/sh"}
        answer = _living(stack, prefix, told, environment | {"WALL_STAGE_SECRET": mark}, folder)
        agent = _sessions(stack, prefix, name, environment, folder)
        stack.enter_context(_environment(home, work, mark))
        inherited = os.open(paths["ssh-key"], os.O_RDONLY)
        stack.callback(os.close, inherited)
        os.set_inheritable(inherited, True)
        places = {
            "victim": outside / "victim",
            "outside": outside,
            "home": home,
            "package": Path(sysconfig.get_path("purelib")),
            "repository": work,
            "other_scratch": Path(other),
            "hub": home / ".cache/huggingface/hub",
        }
        planted = (outside / "victim", *paths.values())
        yield {
            **answer,
            "secrets": {secret: str(path) for secret, path in paths.items()},
            "places": {place: str(path) for place, path in places.items()},
            "planted": {
                place: [str(one) for one in planted if one.is_relative_to(path)]
                for place, path in places.items()
            },
            "inherited": inherited,
            "victim": str(outside / "victim"),
            "outside": str(outside),
            "repository": str(work),
            "programs": [str(PROGRAM), str(wall_child.__file__)],
            "handles": [_handle(path) for path in paths.values()],
            "sockets": {**sockets, "abstract": told["abstract"], "datagram": told["datagram"]},
            "tmux": _tmux_socket(name, user),
            "ssh_agent": agent,
        }


def _living(
    stack: ExitStack, prefix: list[str], told: Given, environment: dict[str, str], folder: Path
) -> Given:
    """Start what holds the mark; return where it is."""
    living = stack.enter_context(
        subprocess.Popen(
            [*prefix, SYSTEM_PYTHON, _for_all(_OUTSIDE, folder), json.dumps(told)],
            stdin=subprocess.PIPE,  # it ends when this is closed
            stdout=subprocess.PIPE,
            env=environment,
            cwd=folder / "home",
        )
    )
    assert living.stdout is not None
    return dict(json.loads(living.stdout.readline()))


def _sessions(
    stack: ExitStack, prefix: list[str], name: str, environment: dict[str, str], folder: Path
) -> str:
    """Start a session of tmux and an agent with a key; return the agent's socket."""
    tmux = ["tmux", "-L", name, "-f", os.devnull]
    _done([*prefix, *tmux, "new-session", "-d", "sleep 3000"], environment)
    # tmux leaves its socket behind.
    left = _tmux_socket(name, None if not prefix else STRANGER)
    stack.callback(Path(left).unlink, missing_ok=True)
    stack.callback(_done, [*prefix, *tmux, "kill-server"], environment)
    socket, key = str(folder / "agent/socket"), str(folder / "home/agent-key")
    keeper = subprocess.Popen(
        [*prefix, "ssh-agent", "-D", "-a", socket], env=environment, stdout=subprocess.DEVNULL
    )
    stack.callback(keeper.wait, 10)
    stack.callback(keeper.terminate)
    _done([*prefix, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], environment)
    _done([*prefix, "ssh-add", "-q", key], environment | {"SSH_AUTH_SOCK": socket})
    return socket


def _tmux_socket(name: str, user: int | None) -> str:
    return f"/tmp/tmux-{os.getuid() if user is None else user}/{name}"


def _as_user(user: int) -> list[str]:
    return ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]


def _for_all(program: Path, folder: Path) -> str:
    """Copy a program to where other users may read it."""
    return str(shutil.copy(program, folder / program.name))


def _done(words: Sequence[str], environment: dict[str, str]) -> None:
    for _ in range(50):
        if subprocess.run(words, env=environment, capture_output=True, check=False).returncode == 0:
            return
    raise AssertionError(f"{words} fails")


def _commit(work: Path, mark: str) -> None:
    """Commit answers, which are then removed from the folder."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(work)]
    config = work / ".git/config"
    config.unlink()
    (work / "answers.jsonl").write_text(f'{{"answer": "{mark}"}}\n')
    for words in (["init", "-q"], ["add", "answers.jsonl"], ["commit", "-q", "-m", "answers"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    (work / "answers.jsonl").unlink()
    with config.open("a", encoding="utf-8") as file:
        file.write(f'[remote "origin"]\n\turl = https://user:{mark}@127.0.0.1/x\n')


@contextmanager
def _environment(home: Path, work: Path, mark: str) -> Iterator[None]:
    before, folder = dict(os.environ), Path.cwd()
    os.environ.update(HOME=str(home), AGENTRL_ADMIN_KEY=mark, SSH_AUTH_SOCK=mark)
    os.chdir(work)
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(before)


def _handle(path: Path) -> str:
    """Return the handle by which the kernel opens a file without its path."""
    handle, mount = (ctypes.c_char * 136)(), ctypes.c_int()
    ctypes.c_uint32.from_buffer(handle).value = 128
    libc = ctypes.CDLL(None)
    libc.name_to_handle_at(-100, str(path).encode(), handle, ctypes.byref(mount), 0)
    return handle.raw[: 8 + ctypes.c_uint32.from_buffer(handle).value].hex()


def seen_outside(given: Given) -> dict[str, str]:
    """Return what the ways have left outside, whatever they say themselves."""
    outside = Path(given["outside"])
    found = {f"left {path.name}": "seen outside" for path in outside.iterdir()}
    del found["left victim"]
    if (outside / "victim").read_text(encoding="utf-8") != "mine\n":
        found["changed victim"] = "seen outside"
    for pid in given["pids"]:
        if not Path(f"/proc/{pid}").exists():
            found["ended a process outside"] = "seen outside"
    return found


def unconfined(given: Given, user: int | None = None) -> dict[str, str]:
    """Return the harmless ways that succeed where nothing confines them; their traces go."""
    names = [name for name, way in WAYS.items() if way.is_harmless and way.kind != "bomb"]
    with tempfile.TemporaryDirectory(prefix="wall-control-") as scratch:
        if user is not None:
            os.chown(scratch, user, user)
        told = json.dumps({**given, "control": True})
        prefix = [] if user is None else _as_user(user)
        program = _for_all(PROGRAM, Path(given["outside"]).parent)
        ended = subprocess.run(
            [*prefix, SYSTEM_PYTHON, program, told, *names],
            env=os.environ | {"TMPDIR": scratch},
            pass_fds=[given["inherited"]],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_SECONDS,
        )
    for place in given["places"].values():
        with suppress(OSError):
            os.unlink(f"{place}/left-by-a-program")
    for path in Path(given["outside"]).iterdir():
        path.unlink()
    Path(given["victim"]).write_text("mine\n", encoding="utf-8")
    return dict(json.loads(ended.stdout))


# --- doors ------------------------------------------------------------------------------------


async def _bare(given: Given, user: int | None = None) -> dict[str, str]:
    """Try the ways behind a wall alone."""
    with scratch_directory("agentrl-tools-") as scratch:
        wall = Wall(scratch=Path(scratch), directory=given["repository"])
        words = _command(wall, given, [json.dumps(given)], user)
        ended = await asyncio.to_thread(_ended, words, wall.environment())
    return dict(json.loads(ended.stdout))


async def _bare_as_stranger(given: Given) -> dict[str, str]:
    return await _bare(given, STRANGER)


def _ended(words: list[str], environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        words,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )


def _command(wall: Wall, given: Given, words: list[str], user: int | None) -> list[str]:
    """Return the command that tries ways behind a wall, started by this user or another."""
    folder = Path(given["outside"]).parent
    program, starter = (_for_all(path, folder) for path in (PROGRAM, Path(wall_child.__file__)))
    *_, plan, first, second = wall.command([SYSTEM_PYTHON, program])
    content = json.loads(plan)
    # A stranger reads nothing of this user's environments, and the program needs none of them.
    content["mounts"] = [one for one in content["mounts"] if one[3]]
    content["mounts"].append([program, program, False, False])
    # What no figure shows counts where the machine is short of memory, which it is not to be here.
    content["spare_bytes"] = sys.maxsize
    if user is not None:
        os.chown(str(wall.scratch), user, user)
        os.chmod(Path(str(wall.scratch)).parent, 0o711)
    start = [SYSTEM_PYTHON, "-I", "-S", starter, json.dumps(content)]
    return [*([] if user is None else _as_user(user)), *start, first, second, *words]


def _config(given: Given, **flags: str) -> RootConfig:
    folder = Path(given["outside"]).parent
    words = {
        "run_name": "other",
        "train_file": "questions.jsonl",
        "output_dir": "output",
        "mongo_data_dir": str(folder / "mongo"),
        "mongo_port": "0",
        "logs_dir": str(folder / "logs"),
        **flags,
    }
    return parse_flags([part for name, text in words.items() for part in (f"--{name}", text)])


async def _asked(config: ToolsConfig, given: Given) -> dict[str, str]:
    limits = {f"{what}_timeout_seconds": PATIENCE_SECONDS for what in ("connect", "start", "call")}
    limits["max_call_seconds"] = PATIENCE_SECONDS
    async with connect_tools(config.model_copy(update=limits)) as box, box.for_rollout() as own:
        result = await own.call(own.specs[0].name, {"given": json.dumps(given)})
        assert not result.is_error, result.content
        return dict(json.loads(result.content))


async def _stdio(given: Given) -> dict[str, str]:
    server = {"command": sys.executable, "args": [str(SERVER)], "per_rollout": True}
    servers = json.dumps({"mcpServers": {"attack": server}})
    config = _config(given, mcp_servers=servers, tool_visible_paths=str(PROGRAM))
    return await _asked(tools_of(config), given)


async def _tool_server(given: Given) -> dict[str, str]:
    command = f"{sys.executable} {SERVER} {{port}}"
    config = _config(given, tool_server_command=command, tool_visible_paths=str(PROGRAM))
    async with LocalCluster(config) as cluster:
        await cluster.open_store()
        cluster.write_config()
        await cluster.start_tool_server()
        return await _asked(tools_config(cluster.config.tools), given)


async def _agent(given: Given) -> dict[str, str]:
    command = f"{sys.executable} {PROGRAM} {{query}}"
    play = command_agent(_config(given, agent_command=command))
    task = MCPTask(id="train/0/q1", query=json.dumps(given), answer="7", scorer="exact")
    printed: Any = play(task, AgentEndpoint("http://127.0.0.1:1/s/x/v1", "m", "own-key"))
    return dict(json.loads(await printed))


async def _answer(given: Given) -> dict[str, str]:
    source = PROGRAM.read_text(encoding="utf-8")
    call = f"{source.partition('if __name__')[0]}\nprint(json.dumps(attempts(json.loads(input()))))"
    run = await run_python(call, stdin=json.dumps(given), seconds=PATIENCE_SECONDS)
    assert run.status == 0, run.errors
    return dict(json.loads(run.output))


async def _sandbox(given: Given) -> dict[str, str]:
    def play() -> tuple[int, str]:
        with ProcessSandbox("/app", {}, memory_mb=1024, network=False) as sandbox:
            given_file = Path(given["outside"]).parent / "given.json"
            given_file.write_text(json.dumps(given), encoding="utf-8")
            sandbox.put(PROGRAM, "/app/wall_attacks.py")
            sandbox.put(given_file, "/app/given.json")
            command = 'python3 wall_attacks.py "$(cat given.json)" 2>/dev/null'
            return sandbox.shell(command, PATIENCE_SECONDS)

    status, output = await asyncio.to_thread(play)
    assert status == 0, output
    return dict(json.loads(output))


DOORS: dict[str, Callable[[Given], Coroutine[Any, Any, dict[str, str]]]] = {
    "stdio server": _stdio,
    "tool server": _tool_server,
    "agent's program": _agent,
    "answer's code": _answer,
    "Harbor sandbox": _sandbox,
    "wall of root": _bare,
    "wall of another user": _bare_as_stranger,
}


# --- bombs ------------------------------------------------------------------------------------


_OF_DISK = (
    *("one large file", "many files", "files in deep folders", "deleted files on the disk"),
    *("a sparse file that is filled", "files that a folder without rights hides"),
)


def bombed(folder: Path, name: str, user: int | None = None) -> Figures:
    """Run a bomb behind a wall; return the most that it held, its bound, and whether it kept it.

    Memory and disk count in mebibytes. What holds twice its bound for two seconds has passed the wall.
    """
    bound = DISK_MIB if name in _OF_DISK else MEMORY_MIB
    bound = PROCESSES if name in ("processes", "threads") else bound
    (folder / "outside").mkdir(exist_ok=True)
    given = {"most": 2 * bound, "outside": str(folder / "outside")}
    with scratch_directory("agentrl-tools-") as scratch:
        wall = Wall(scratch=Path(scratch), memory_bytes=MEMORY_MIB << 20, disk_bytes=DISK_MIB << 20)
        words = _command(wall, given, [json.dumps(given), name], user)
        ended = subprocess.run(
            words, env=wall.environment(), capture_output=True, text=True, check=False, timeout=60
        )
    held = [int(line) for line in ended.stdout.split() if line.isdigit()]
    return {"held": max(held, default=0), "bound": bound, "is_kept": "kept" in ended.stdout}


# --- figures ----------------------------------------------------------------------------------

STARTS = 20


def tried(door: str) -> Figures:
    """Try all ways behind one door; return how many there were, and what left, read or was seen."""
    user = STRANGER if DOORS[door] is _bare_as_stranger else None
    with tempfile.TemporaryDirectory(prefix="wall-stage-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with stage(folder, user) as given:
            found = asyncio.run(DOORS[door](given))
            seen = seen_outside(given)
            control = unconfined(given, user)
    ways = {way: WAYS[way].kind for way in found}
    return {
        "tried": sum(way.kind != "bomb" for way in WAYS.values()),
        "left": sorted([*(way for way, kind in ways.items() if kind == "leave"), *seen]),
        "read": sorted(way for way, kind in ways.items() if kind == "read"),
        "control": len(control),
    }


def all_bombed(user: int | None = None) -> dict[str, Figures]:
    """Return what each bomb held behind a wall, one after another."""
    held = {}
    for name in (name for name, way in WAYS.items() if way.kind == "bomb"):
        with tempfile.TemporaryDirectory(prefix="wall-bomb-") as folder:
            Path(folder).chmod(0o755)
            held[name] = bombed(Path(folder), name, user)
    return held


def start_times() -> Figures:
    """Return by how many milliseconds, of the clock and of a processor, a wall delays a start."""
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "confined": []}
    with scratch_directory("agentrl-tools-") as scratch:
        wall = Wall(scratch=Path(scratch))
        commands = {"bare": ["true"], "confined": wall.command(["true"])}
        for _ in range(STARTS):
            for kind, words in commands.items():
                begun, before = time.monotonic(), os.times()
                subprocess.run(words, check=True, env=wall.environment())
                after = os.times()
                spent = after.children_user + after.children_system
                spent -= before.children_user + before.children_system
                times[kind].append((time.monotonic() - begun, spent))
    medians = {
        kind: [median(column) for column in zip(*rows, strict=True)] for kind, rows in times.items()
    }
    clock, processor = (
        round(1000 * (confined - bare), 1)
        for bare, confined in zip(medians["bare"], medians["confined"], strict=True)
    )
    return {"start_ms": clock, "start_processor_ms": processor}
