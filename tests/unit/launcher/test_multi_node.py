"""What `agentrl run` refuses, starts and waits for on several machines."""

import asyncio
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from agentrl.config.command_line import parse_flags
from agentrl.config.loading import write_config
from agentrl.config.sections import TrainerSection
from agentrl.config.validation.rank_checks import check_machines
from agentrl.errors import AgentRLError, ConfigError
from agentrl.launcher.checks.preflight import check_inputs
from agentrl.launcher.cluster.child_commands import trainer_command
from agentrl.launcher.multi_node import check_same_flags, wait_for_first
from agentrl.runtime.ports import free_port

TWO = {
    "num_machines": "2",
    "num_processes": "4",
    "main_process_ip": "host0",
    "db_connection_string": "mongodb://db/x",
}


def words(flags: dict[str, str]) -> list[str]:
    return [word for name, value in flags.items() for word in (f"--{name}", value)]


def test_machines_that_fit_together_are_taken() -> None:
    for rank in "01":
        check_machines(parse_flags(words(TWO | {"machine_rank": rank})))
    check_machines(parse_flags(["--num_processes", "3"]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"machine_rank": "1"}, "--machine_rank 1: machines are numbered from 0, and"),
        (TWO | {"machine_rank": "2"}, "and --num_machines is 2"),
        ({"num_processes": "2000"}, "a machine starts at most 1024 ranks; give one per GPU"),
        (TWO | {"num_processes": "3"}, "--num_processes 3 is the number of ranks on all machines"),
        (TWO | {"main_process_ip": "none"}, "needs --main_process_ip (or MASTER_ADDR)"),
        (TWO | {"db_connection_string": "none"}, "needs --db_connection_string (or MONGODB_URI)"),
    ],
)
def test_machines_that_cannot_come_together_are_one_clear_line(
    flags: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_machines(parse_flags(words(flags)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "place"),
    [
        ({"num_processes": "2"}, (2, 1, 0, None, 0)),
        (TWO | {"machine_rank": "1", "main_process_port": "29511"}, (4, 2, 1, "host0", 29511)),
    ],
)
def test_accelerate_is_told_the_place_of_the_machine(
    flags: dict[str, str], place: tuple[object, ...]
) -> None:
    argv = trainer_command(parse_flags(words(flags)).trainer, Path("/shared/config.yaml"))
    taken = launch_command_parser().parse_args(argv[3:])
    assert place == (
        taken.num_processes,
        taken.num_machines,
        taken.machine_rank,
        taken.main_process_ip,
        taken.main_process_port,
    )
    rest = [taken.training_script, *taken.training_script_args]
    assert rest == ["agentrl", "train", "--config", "/shared/config.yaml"]


async def test_a_port_that_is_taken_is_refused_before_anything_starts() -> None:
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        config = parse_flags(words(TWO | {"main_process_port": str(port)}))
        with pytest.raises(
            ConfigError, match=f"--main_process_port {port} is in use on this machine"
        ):
            await check_inputs(config)


async def test_a_further_machine_waits_until_the_first_listens() -> None:
    trainer = TrainerSection(main_process_ip="127.0.0.1", main_process_port=free_port())
    waiting = asyncio.create_task(wait_for_first(trainer))
    await asyncio.sleep(0)
    async with await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", trainer.main_process_port
    ):
        await asyncio.wait_for(waiting, 10)


async def test_a_first_machine_that_never_comes_is_named() -> None:
    trainer = TrainerSection(main_process_ip="127.0.0.1", main_process_port=free_port())
    with pytest.raises(
        AgentRLError, match=f"127.0.0.1:{trainer.main_process_port} does not respond"
    ):
        await wait_for_first(trainer, timeout_seconds=0)


async def test_an_address_that_is_none_is_said_at_once() -> None:
    with pytest.raises(
        ConfigError, match=r"--main_process_ip no\.\.such\.\.host is not a valid address"
    ):
        await wait_for_first(TrainerSection(main_process_ip="no..such..host"))


async def test_an_output_directory_that_is_not_shared_is_refused(tmp_path: Path) -> None:
    config = parse_flags(words(TWO))
    with pytest.raises(
        ConfigError, match=("--output_dir must be a directory shared by all machines")
    ):
        await check_same_flags(config, tmp_path / "config.yaml", timeout_seconds=0)


async def test_machines_started_with_different_flags_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    fitted = {"max_tokens": "8192"}
    write_config(parse_flags(words(TWO | fitted | {"tool_server_command": "tools"})), path)
    other = TWO | {"machine_rank": "1", "mcp_manager_url": "http://h/mcp"}
    await check_same_flags(parse_flags(words(other)), path)
    with pytest.raises(ConfigError, match="--max_tokens is 9 here and 8192 on machine 0"):
        await check_same_flags(parse_flags(words(other | {"max_tokens": "9"})), path)
    with pytest.raises(ConfigError, match=r"--learning_rate is 0\.5 here"):
        await check_same_flags(parse_flags(words(other | {"learning_rate": "0.5"})), path)
