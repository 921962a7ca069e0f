"""Tasks in Harbor's format that somebody made to reach this machine, or to stop a run."""

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.harbor import TEST, write_task

from agentrl.errors import AgentError, ConfigError
from agentrl.plugins.environments.environment_kinds import run_call
from agentrl.plugins.environments.harbor_format import content_hash
from agentrl.plugins.environments.harbor_sandboxes import ProcessSandbox
from agentrl.plugins.environments.harbor_tasks import HarborTask, load_tasks
from agentrl.runtime.processes.wall import wall_gap

needs_namespaces = pytest.mark.skipif(wall_gap() is not None, reason="no namespaces here")


def only(folder: Path) -> HarborTask:
    (task,) = load_tasks(str(folder), "process", skip_build=False)
    return task


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_tasks(str(folder), "process", skip_build=False)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 600
    return said


@needs_namespaces
@pytest.mark.parametrize("place", ["instruction.md", "task.toml"])
@pytest.mark.parametrize("target", ["/etc/passwd", "/dev/zero"])
def test_a_text_that_leads_out_of_its_folder_is_refused(
    tmp_path: Path, place: str, target: str
) -> None:
    folder = write_task(tmp_path / "task")
    (folder / place).unlink()
    (folder / place).symlink_to(target)
    assert f"{folder / place}" in refused(folder)


@needs_namespaces
@pytest.mark.parametrize("place", ["tests/more", "environment/more", "environment/a/b"])
def test_a_file_that_leads_out_of_its_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "private").write_text("shh")
    folder = write_task(tmp_path / "task")
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    (folder / place).symlink_to(tmp_path / "private")
    assert refused(folder) == f"{folder / place}: it points outside {folder}"


@needs_namespaces
def test_a_folder_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "environment").rename(tmp_path / "private")
    (folder / "environment").symlink_to(tmp_path / "private")
    assert refused(folder) == f"{folder / 'environment'}: it points outside {folder}"


@needs_namespaces
def test_a_pipe_in_place_of_a_text_keeps_nobody_waiting(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    (folder / "instruction.md").unlink()
    os.mkfifo(folder / "instruction.md")
    assert refused(folder) == f"{folder / 'instruction.md'}: it is not a file"
    (folder / "instruction.md").unlink()
    (folder / "instruction.md").write_text("now a text")
    os.mkfifo(folder / "tests/pipe")
    assert refused(folder) == f"{folder / 'tests/pipe'}: it is not a file"


@needs_namespaces
def test_a_text_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "task")
    os.truncate(folder / "instruction.md", 5 << 30)
    assert "larger than 1 MiB" in refused(folder)


@needs_namespaces
@pytest.mark.parametrize(
    ("dockerfile", "problem"),
    [
        ("FROM x\nCOPY ../../private /app/\n", "COPY ../../private"),
        ("FROM x\nCOPY absent /app/\n", "COPY absent"),
        ("FROM x\nCOPY ../*rivate /app/\n", "COPY ../*rivate"),
        ("FROM x\nCOPY data.txt\n", "expected a source and a destination"),
    ],
)
def test_what_a_dockerfile_copies_is_the_tasks_own(
    tmp_path: Path, dockerfile: str, problem: str
) -> None:
    (tmp_path / "private").write_text("shh")
    assert problem in refused(write_task(tmp_path / "task", dockerfile=dockerfile))


@needs_namespaces
@pytest.mark.parametrize("back", ["/..", "/a/../..", "//..", "../.."])
def test_nothing_is_written_outside_of_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    target = f"{back}/../../../../../../..{tmp_path}/taken"
    dockerfile = f"FROM x\nCOPY data.txt {target}/file\nWORKDIR {target}\n"
    task = only(write_task(tmp_path / "task", dockerfile=dockerfile))
    with task.open("process") as box:
        assert box.shell("pwd; cat file", 10) == (0, f"{tmp_path}/taken\ngiven")
    assert not (tmp_path / "taken").exists()


@needs_namespaces
@pytest.mark.parametrize("place", ["/usr/../usr/x", "//usr/x", "/a/../etc", "/lib64/x"])
def test_this_machines_programs_are_not_replaced(tmp_path: Path, place: str) -> None:
    toml = f'[environment]\nworkdir = "{place}"\n'
    assert "belongs to this machine" in refused(write_task(tmp_path / "task", toml=toml))


@needs_namespaces
@pytest.mark.parametrize("where", ["task", "dockerfile", "verifier"])
def test_variables_of_a_task_reach_no_program_outside_of_the_sandbox(
    tmp_path: Path, where: str
) -> None:
    source, evil = tmp_path / "evil.c", tmp_path / "evil.so"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void begin(void) "
        f'{{ FILE *f = fopen("{tmp_path}/taken", "w"); if (f) fclose(f); }}\n'
    )
    built = subprocess.run(["cc", "-shared", "-fPIC", "-o", evil, source], check=False)
    if built.returncode:
        pytest.skip("no C compiler")
    line = f'env = {{ LD_PRELOAD = "{evil}", SEEN = "yes" }}'
    tomls = {"task": f"[environment]\n{line}", "verifier": f"[verifier]\n{line}"}
    dockerfile = f"FROM x\nENV LD_PRELOAD={evil}\nENV SEEN=yes" if where == "dockerfile" else ""
    test = f"{TEST}\necho $SEEN > /app/seen"
    folder = write_task(
        tmp_path / "task", toml=tomls.get(where, ""), test=test, dockerfile=dockerfile
    )
    task = only(folder)
    with task.open("process") as box:
        with suppress(AgentError):  # the loader's complaint may stand in place of the reward
            task.reward(box)
        assert "yes" in str(box.read("/app/seen"))
    assert not (tmp_path / "taken").exists()


@needs_namespaces
@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("verifier = 3", "verifier: expected a table"),
        ('metadata = "x"', "metadata: expected a table"),
        ("[environment]\nenv = [1]", "environment.env: expected a table"),
        (
            '[environment]\nenv = { "A=B" = "x" }',
            "environment.env: 'A=B' is not a valid variable name",
        ),
        ('[environment]\nenv = { A = "x\\u0000" }', "environment.env.A"),
        ("[environment]\nworkdir = 3", "environment.workdir: expected a path"),
        ('[environment]\nworkdir = "app"', "environment.workdir: expected a path"),
        ("[environment]\nmemory_mb = 1e300", "environment.memory_mb"),
        ("[environment]\nmemory_mb = -5", "environment.memory_mb"),
        ('[environment]\nmemory = "99999999T"', "environment.memory"),
        ("[environment]\ncpus = nan", "environment.cpus"),
        ("[agent]\ntimeout_sec = inf", "agent.timeout_sec"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec"),
        ('[verifier]\ntimeout_sec = "soon"', "verifier.timeout_sec"),
        ("[environment]\nbuild_timeout_sec = [1]", "environment.build_timeout_sec"),
        ('[environment]\ndocker_image = "--privileged"', "environment.docker_image"),
        ("x = " + "[" * 100_000, "task.toml"),
        ("x = " + "9" * 5_000, "task.toml"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(tmp_path: Path, toml: str, problem: str) -> None:
    assert problem in refused(write_task(tmp_path / "task", toml=toml))


@needs_namespaces
@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "environment/Dockerfile"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_task(tmp_path / "task")
    (folder / name).write_bytes(b"\xff\xfe\x00")
    assert f"{folder / name}: it is not UTF-8 text" in refused(folder)


@needs_namespaces
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("reward.json", "[" * 100_000),
        ("reward.json", '{"reward": 1' + "0" * 400 + "}"),
        ("reward.json", '{"reward": NaN}'),
        ("reward.txt", "1e999"),
    ],
)
def test_a_reward_that_is_no_number_fails_the_attempt(
    tmp_path: Path, name: str, written: str
) -> None:
    folder = write_task(tmp_path / "task", test=f"cp /tests/written /logs/verifier/{name}")
    (folder / "tests/written").write_text(written)
    task = only(folder)
    with task.open("process") as box, pytest.raises(AgentError, match="wrote no reward"):
        task.reward(box)


@needs_namespaces
@pytest.mark.parametrize(
    "command", ["\0", "\ud800", "x" * 3_000_000, "yes | head -c 30000000; echo end"]
)
def test_any_command_of_the_policy_has_an_answer(command: str) -> None:
    call: dict[str, Any] = {"function": {"arguments": json.dumps({"command": command})}}
    with ProcessSandbox("/app", {}, memory_mb=256, network=False) as box:
        assert len(run_call(box, call, 20.0)) < 10_000


@needs_namespaces
def test_what_a_command_prints_without_end_fills_no_disk(tmp_path: Path) -> None:
    def num_free() -> int:
        disk = os.statvfs(tempfile.gettempdir())
        return disk.f_bavail * disk.f_frsize

    taken = []
    with ProcessSandbox("/app", {}, memory_mb=256, network=False) as box:
        for _ in range(3):  # others write to this disk, too
            before = num_free()
            status, said = box.shell("yes", 1.0)
            taken.append(before - num_free())
            assert status == 124
            assert len(said) <= 1 << 20
    assert min(taken) < 256 << 20


@needs_namespaces
def test_shared_memory_is_bounded_as_memory_is() -> None:
    with ProcessSandbox("/app", {}, memory_mb=64, network=False) as box:
        status, said = box.shell("head -c 100M /dev/zero > /dev/shm/x", 10)
    assert status != 0
    assert "No space" in said


@needs_namespaces
@pytest.mark.parametrize("place", ["/tests", "/tests/sub", "/logs/verifier"])
def test_the_policy_has_no_place_where_the_verifier_reads(tmp_path: Path, place: str) -> None:
    toml = f'[environment]\nworkdir = "{place}"\n'
    said = refused(write_task(tmp_path / "task", toml=toml))
    assert said.endswith(f"{place} is reserved for its verifier")


def test_an_image_is_named_by_the_content_of_its_folder(tmp_path: Path) -> None:
    (one, other) = (
        write_task(tmp_path / name, dockerfile="FROM x") / "environment" for name in "ab"
    )
    script, same = other / "bin/run.sh", content_hash(one)
    assert content_hash(other) == same
    os.utime(other / "data.txt", (1, 1))
    assert content_hash(other) == same
    found = [same]
    script.parent.mkdir()
    found.append(content_hash(other))
    script.write_text("true")
    found.append(content_hash(other))
    script.write_text("trve")
    found.append(content_hash(other))
    script.chmod(0o700)
    found.append(content_hash(other))
    script.rename(script.with_name("rvn.sh"))
    found.append(content_hash(other))
    (other / "link").symlink_to("data.txt")
    found.append(content_hash(other))
    (other / "link").unlink()
    (other / "link").symlink_to("data.tyt")
    found.append(content_hash(other))
    assert len(set(found)) == len(found)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    folder, outside = tmp_path / "environment", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "folder").symlink_to(outside)
    (folder / "endless").symlink_to("/dev/zero")
    (folder / "loop").symlink_to(folder)
    before = content_hash(folder)
    (outside / "private").write_text("shh")
    assert content_hash(folder) == before


def test_what_cannot_be_part_of_an_image_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe: it is not a file$"):
        content_hash(tmp_path)
    (tmp_path / "pipe").unlink()
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(3 << 30)
    monkeypatch.setattr("agentrl.plugins.environments.harbor_format._MAX_CONTEXT_BYTES", 1 << 30)
    with pytest.raises(ConfigError, match=r"it is larger than 1 GiB$"):
        content_hash(tmp_path)
    (tmp_path / "sparse").unlink()
    (tmp_path / "a").write_text("")
    (tmp_path / "b").write_text("")
    monkeypatch.setattr("agentrl.plugins.environments.harbor_format._MAX_CONTEXT_ENTRIES", 1)
    with pytest.raises(ConfigError, match=r"it has more than 1 entries$"):
        content_hash(tmp_path)
