"""Tasks in Harbor's format: read, played in processes with a root of their own, and paid by their tests."""

import os
from pathlib import Path

import pytest
from support.harbor import TOML, write_task

from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments.harbor_sandboxes import ProcessSandbox
from agentrl.plugins.environments.harbor_tasks import HarborTask, load_tasks
from agentrl.runtime.processes.wall import wall_gap

needs_namespaces = pytest.mark.skipif(wall_gap() is not None, reason="no namespaces here")


def only(folder: Path) -> HarborTask:
    (task,) = load_tasks(str(folder), "process", skip_build=False)
    return task


@needs_namespaces
def test_tasks_of_a_folder_are_read_in_their_order(tmp_path: Path) -> None:
    for name in ("b", "a/deep", ".hidden/x"):
        write_task(tmp_path / name)
    tasks = load_tasks(str(tmp_path), "process", skip_build=False)
    assert [task.folder.name for task in tasks] == ["deep", "b"]
    task = tasks[0]
    assert (task.instruction, task.tags) == ("Write hello into greeting.txt.", ("files", "easy"))
    assert (task.agent_seconds, task.verifier_seconds, task.memory_mb) == (30.0, 10.0, 512)
    assert (task.directory, task.has_network, task.variables) == (
        "/app",
        False,
        {"GREETING": "hello"},
    )


@needs_namespaces
@pytest.mark.parametrize(("command", "reward"), [("echo hello > greeting.txt", 1.0), ("true", 0.0)])
def test_the_tests_of_a_task_pay_for_what_was_done(
    tmp_path: Path, command: str, reward: float
) -> None:
    task = only(write_task(tmp_path))
    with task.open("process") as box:
        assert box.shell("cat data.txt; echo $GREETING", 10) == (0, "givenhello\n")
        assert box.shell(command, 10)[0] == 0
        assert task.reward(box) == (reward, {})


@needs_namespaces
def test_a_reward_that_the_policy_wrote_itself_is_not_paid(tmp_path: Path) -> None:
    task = only(write_task(tmp_path, test="exit 3"))
    with task.open("process") as box:
        box.shell(
            "echo 1 > /logs/verifier/reward.txt; mkdir -p /tmp/x; ln -s /etc/passwd /app/y", 10
        )
        with pytest.raises(AgentError, match=r"wrote no reward .*status 3: it printed nothing"):
            task.reward(box)


@needs_namespaces
@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{"reward": 0.5, "speed": 2, "why": "slow"}', (0.5, {"speed": 2.0})),
        ('{"share": 0.25}', (0.25, {"share": 0.25})),
        ('{"a": 1, "b": 0}', None),
        ("[1]", None),
        ("good", None),
    ],
)
def test_figures_beside_the_reward_are_metrics(
    tmp_path: Path, written: str, expected: tuple[float, dict[str, float]] | None
) -> None:
    task = only(write_task(tmp_path, test=f"echo '{written}' > /logs/verifier/reward.json"))
    with task.open("process") as box:
        if expected is None:
            with pytest.raises(AgentError, match="wrote no reward"):
                task.reward(box)
        else:
            assert task.reward(box) == expected


@needs_namespaces
def test_commands_see_nothing_of_this_machine_but_its_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "shh")
    (tmp_path / "private").write_text("shh")
    with ProcessSandbox("/app", {}, memory_mb=256, network=False) as box:
        assert box.shell("pwd; echo $A_SECRET; echo ~; ls -A", 10) == (0, "/app\n\n/root\n")
        for path in (tmp_path, Path.cwd() / "tests", "/etc/shadow", "/var/log", "/home"):
            assert box.shell(f"ls {path}", 10)[0] != 0, path
        for path in ("/usr/x", "/etc/x", "/x"):
            assert "Read-only" in box.shell(f"touch {path}", 10)[1], path
        assert box.shell("ls /sys/class/net; cat /proc/net/dev | wc -l", 10)[1].endswith("3\n")
        devices = {"fd", "full", "null", "tty", "ptmx", "pts", "random", "shm", "urandom", "zero"}
        devices |= {"stdin", "stdout", "stderr"}
        assert set(box.shell("ls /dev", 10)[1].split()) == devices
        assert box.shell("echo x > /dev/null; head -c 3 /dev/urandom | wc -c", 10) == (0, "3\n")
        pids = box.shell("ls /proc | grep -c '^[0-9]'", 10)[1]
        assert int(pids) < 8
        assert box.shell(f"kill -0 {os.getpid()}", 10)[0] != 0
        assert box.shell("head -c 600M /dev/zero | tail -c 500M | wc -c", 20)[1] != "524288000\n"


@needs_namespaces
def test_a_command_that_does_not_end_is_ended_with_all_that_it_began() -> None:
    with ProcessSandbox("/app", {}, memory_mb=256, network=False) as box:
        status, said = box.shell("echo begun; (sleep 50; echo late > /app/late) & sleep 50", 0.5)
        assert (status, said) == (124, "begun\n")
        assert box.shell("ls", 10) == (0, "")


@pytest.mark.parametrize(
    ("toml", "dockerfile", "problem"),
    [
        ("[environment", "", r"task\.toml: Expected"),
        ("[[steps]]\nname = 'a'", "", "it has several steps"),
        ('[verifier]\nenvironment_mode = "separate"', "", "requires its own container"),
        (
            '[environment]\nmemory = "lots"',
            "",
            "environment.memory: 'lots' is not a size such as 2G",
        ),
        (TOML, "FROM x\nRUN apt-get install -y vim", "`RUN apt-get install -y vim` needs Docker"),
        (TOML, "FROM x\nCOPY --from=y /a /b", "`COPY --from=y /a /b` needs Docker"),
        (TOML, "FROM x\nCOPY absent.txt /b", r"`COPY absent\.txt /b`: .* contains no absent"),
        (TOML, "FROM x\nENV A='", "`ENV A='`: No closing quotation"),
        (TOML, "FROM x\nWORKDIR /usr/src/app", "/usr/src/app belongs to this machine"),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_in_one_line(
    tmp_path: Path, toml: str, dockerfile: str, problem: str
) -> None:
    write_task(tmp_path, toml, dockerfile=dockerfile)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_tasks(str(tmp_path), "process", skip_build=False)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tasks_and_an_unknown_runtime_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no task\.toml found in"):
        load_tasks(str(tmp_path), "process", skip_build=False)
    with pytest.raises(ConfigError, match="folder "):
        load_tasks(str(tmp_path / "absent"), "process", skip_build=False)
    write_task(tmp_path / "one")
    with pytest.raises(ConfigError, match="runtime=podman: expected docker or process"):
        load_tasks(str(tmp_path), "podman", skip_build=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"docker program was not found.*\?runtime=process runs"):
        load_tasks(str(tmp_path), "docker", skip_build=False)


@needs_namespaces
@pytest.mark.parametrize(
    ("step", "files"),
    [
        ("COPY data.txt given.txt", {"/work/here/given.txt"}),
        ("COPY . /all/", {"/all/data.txt", "/all/more.txt"}),
        ("COPY --chown=1:1 *.txt ./", {"/work/here/data.txt", "/work/here/more.txt"}),
        (
            "COPY data.txt \\\n  # the other one\n  more.txt /two",
            {"/two/data.txt", "/two/more.txt"},
        ),
    ],
)
def test_what_a_dockerfile_copies_lies_where_it_says(
    tmp_path: Path, step: str, files: set[str]
) -> None:
    write_task(tmp_path, dockerfile=f"FROM x\nWORKDIR /work\nWORKDIR here\n{step}\n")
    (tmp_path / "environment/more.txt").write_text("more")
    with only(tmp_path).open("process") as box:
        assert box.shell("pwd; find /work /all /two -type f 2>/dev/null | sort", 10)[
            1
        ] == "\n".join(["/work/here", *sorted(files), ""])


@needs_namespaces
@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ("ENV LEVEL=3", {"LEVEL": "3"}),
        ("ENV LEVEL=3 NAME='a b'", {"LEVEL": "3", "NAME": "a b"}),
        ("ENV LEVEL is high", {"LEVEL": "is high"}),
    ],
)
def test_variables_of_a_dockerfile_are_the_commands(
    tmp_path: Path, step: str, expected: dict[str, str]
) -> None:
    task = only(write_task(tmp_path, toml="", dockerfile=f"FROM x\n{step}\n"))
    assert task.variables == expected
