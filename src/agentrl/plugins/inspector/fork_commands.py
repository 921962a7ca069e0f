"""`agentrl fork`: continue a stored record from one of its turns."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentrl.cli.databases import names_here, opened_store, served_uri
from agentrl.config.command_line import Count, FlagCommand, given_flags
from agentrl.config.loading import load_config
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.runtime.installation import typed_command
from agentrl.runtime.printable import counted, one_line

if TYPE_CHECKING:
    from agentrl.plugins.inspector.fork_run import ForkRequest
    from agentrl.schema import Fork, Record

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@click.command("fork", cls=FlagCommand, sections=("run", "store", "sampling", "tools"))
@click.argument("record_id", metavar="RECORD")
@click.option(
    "--turn", type=Count(least=0), required=True, help="First turn to sample again, counted from 0."
)
@click.option(
    "--version",
    type=Count(least=0),
    help="Policy version; by default the one that the run serves, or its newest.",
)
@click.option(
    "--edit",
    metavar="FILE",
    type=Path,
    help="JSON file of messages that replace the turn's prompt, in the format of --show.",
)
@click.option(
    "--tries", "num_tries", type=Count(), default=1, help="Number of continuations to sample. [1]"
)
@click.option("--show", is_flag=True, help="Print the turn's prompt for editing; sample nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.pass_context
def fork(
    context: click.Context,
    /,
    config: RootConfig,
    record_id: str,
    turn: int,
    edit: Path | None,
    show: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Continue RECORD from one of its turns, with other weights, sampling parameters or messages.

    Turns before --turn are kept, token by token. A running run's servers sample; for a finished
    run, a server is started with the weights of the version. The continuations are stored
    separately and never trained on. The exit status is 1 if one of them failed.
    """
    given = given_flags(context)
    config = _trained_config(config, given)
    if show:
        return asyncio.run(_show(config, record_id, turn))
    from agentrl.plugins.inspector.fork_run import ForkRequest, edited_messages
    from agentrl.runtime.logs import setup_logging

    setup_logging("fork")
    request = ForkRequest(
        record_id,
        turn,
        messages=None if edit is None else edited_messages(_read(edit)),
        sampling={name: getattr(config.sampling, name) for name in _SAMPLING if name in given},
        **options,
    )
    with served_uri(config) as uri:
        config = load_config(
            {**given, "config": _config_path(config, given), "db_connection_string": uri}
        )
        return asyncio.run(_run_and_print(config, request, as_json))


def _config_path(config: RootConfig, given: dict[str, str]) -> str:
    """Return the path of the configuration that the run was trained with."""
    path = config.run.output_path / "config.yaml"
    if path.is_file():
        return str(path)
    if "config" not in given:
        raise ConfigError(
            f"no run {config.run.run_name!r} here: {path} does not exist; give --run_name"
            f"{names_here()} or --config output/RUN_NAME/config.yaml"
        )
    return given["config"]


def _trained_config(config: RootConfig, given: dict[str, str]) -> RootConfig:
    return load_config({**given, "config": _config_path(config, given)})


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--edit {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--edit {path} is not JSON: {error}") from None


async def _show(config: RootConfig, record_id: str, turn: int) -> int:
    from agentrl.plugins.inspector.fork_run import messages_of_turn

    async with opened_store(config) as store:
        messages = await messages_of_turn(store, record_id, turn)
    print(json.dumps({"messages": messages}, indent=2))
    return 0


async def _run_and_print(config: RootConfig, request: "ForkRequest", as_json: bool) -> int:
    from agentrl.plugins.inspector.fork_run import run_fork

    def print_start(fork: "Fork", records: Sequence[str]) -> None:
        if as_json:
            print(
                json.dumps({"fork": fork.id, "version": fork.version, "records": records}),
                flush=True,
            )
        else:
            continuations = counted(len(records), "continuation")
            print(f"{fork.id}: {continuations} by version {fork.version}", flush=True)

    num_failed = 0
    async for record in run_fork(config, request, on_stored=print_start):
        num_failed += record.status == "failed"
        if as_json:
            print(record.model_dump_json(), flush=True)
        else:
            print(one_line(_record_line(record)), flush=True)
    if not as_json:
        name = config.run.run_name
        print(f"  {typed_command('inspect', 'record', record.id, '--run_name', name)}")
    return 1 if num_failed else 0


def _record_line(record: "Record") -> str:
    score = "-" if record.score is None else f"{record.score.value:.3f}"
    outcome = record.error if record.outcome is None else record.outcome
    answer = "" if record.final_answer is None else f"  {record.final_answer}"
    return f"  {record.id}  score {score}  {counted(len(record.turns), 'turn')}  {outcome}{answer}"
