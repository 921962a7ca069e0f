"""`--warm_start`: a run that starts from the result of a fine-tuning, which the same command makes.

The fine-tuning is a run of `agentrl sft` on its own, in `output/RUN_NAME-warm`: it resumes, it is
inspected, and it can be repeated by hand like any other. Input: the run's configuration. Output: the
configuration of the run that trains on from its weights.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl.config.loading import load_config, read_yaml, secret_environment
from agentrl.config.sections import RootConfig
from agentrl.config.validation.checks import check_fine_tuning
from agentrl.errors import AgentRLError, ConfigError, DatasetError
from agentrl.launcher.checks.first_question import first_instruction
from agentrl.launcher.cluster.child_commands import RANK_VARIABLES, trainer_command
from agentrl.launcher.cluster.gpu_placement import GpuMap
from agentrl.launcher.cluster.recovery import last_error
from agentrl.launcher.console.run_report import say
from agentrl.launcher.training_run import Preparation
from agentrl.plugins.sft.demonstrations.demonstration import read_demonstrations
from agentrl.runtime.processes.child_processes import Child, Supervisor
from agentrl.runtime.processes.signals import INTERRUPTED

_INHERITED = ("model_name_or_path", "trust_remote_code", "chat_template", "chat_template_kwargs")
"""Flags of the run that the fine-tuning shares unless its own file sets them."""
_LOG_LINE = re.compile(r"^\S+ \S+ (?:INFO|WARNING) +\S+ [\w.]+: (.*)$")
_STOP_SECONDS = 120.0
"""Fine-tuning finishes its step and saves."""
_POLL_SECONDS = 0.5


def warm_start(config: RootConfig) -> Preparation | None:
    """Return the fine-tuning that `--warm_start` names as preparation of a run; None without one.

    Raises:
        ConfigError: its file is malformed, or names no conversations.
    """
    path = config.data.warm_start
    if path is None:
        return None
    try:
        tuned = load_config({"config": path, **_flags(config, path)})
        check_fine_tuning(tuned.data)
        for source in (tuned.data.train_file, tuned.data.eval_file):
            if source is not None:
                next(iter(read_demonstrations(source)), None)
    except (ConfigError, DatasetError) as error:
        raise ConfigError(f"--warm_start {path}: {error}") from None
    return partial(_tuned, tuned)


async def _tuned(
    tuning: RootConfig, console: Console, config: RootConfig, gpus: GpuMap
) -> RootConfig | None:
    """Fine-tune, unless that was done, and return the run that starts from the result.

    Returns:
        The configuration of the run; None if the fine-tuning was stopped by a signal.
    """
    path = config.data.warm_start
    assert path is not None, "the caller has its configuration"
    output = tuning.run.output_path
    if not _is_complete(output):
        flags = [
            word for name, value in _flags(config, path).items() for word in (f"--{name}", value)
        ]
        child = Child(
            name="sft",
            argv=trainer_command(config.trainer, path, *flags, command="sft"),
            log_path=config.run.logs_dir / f"{tuning.run.run_name}.log",
            environment=secret_environment(config)
            | gpus.environment(gpus.trainer)
            | {"TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
            | RANK_VARIABLES,
            stop_seconds=_STOP_SECONDS,
        )
        say(console, f"warm start: fine-tuning with {path}; the log is {child.log_path}")
        instruction, source = first_instruction(config), tuning.data.train_file
        if instruction and source is not None and not _asks(source, instruction):
            say(
                console,
                f"warm start: {source} asks without the sentence that the run adds to its questions "
                f"({instruction!r}); add it there, or give --answer_instruction none",
            )
        status = await _run(console, child)
        if status == INTERRUPTED:
            return None
        if status or not _is_complete(output):
            end = f"failed (exit {status})" if status else "exited with status 0 before its end"
            raise AgentRLError(
                f"--warm_start: agentrl sft {end}; last lines of {child.log_path}: "
                f"{last_error(child)}"
            )
    else:
        say(console, f"warm start: continuing from the model in {output}/model")
    # The written configuration describes the run alone: what reads it must not fine-tune again.
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"model_name_or_path": str(output / "model")}),
            "data": config.data.model_copy(update={"warm_start": None}),
        }
    )


def _asks(source: Path, instruction: str) -> bool:
    """Return whether the first conversation of a file holds an instruction."""
    shown = next(iter(read_demonstrations(source))).messages
    return any(instruction.strip() in str(message.get("content")) for message in shown)


def _flags(config: RootConfig, path: Path) -> dict[str, str]:
    """Return the flags that the run adds to those in the file."""
    run, own = config.run, read_yaml(path)
    output = run.output_path
    flags = {
        "run_name": f"{run.run_name}-warm",
        "output_dir": str(output.with_name(f"{output.name}-warm")),
        "logs_dir": str(run.logs_dir),
    }
    if run.fresh:
        flags |= {"fresh": "true", "delete_existing": str(run.delete_existing).lower()}
    shared = {name: getattr(config.model, name) for name in _INHERITED} | {"seed": run.seed}
    for name, value in shared.items():
        if name not in own and value is not None:
            flags[name] = value if isinstance(value, str) else json.dumps(value)
    return flags


def _is_complete(output: Path) -> bool:
    summary = output / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "completed"


async def _run(console: Console, child: Child) -> int:
    """Run the fine-tuning to its end, and repeat its log on the console; return its exit status."""
    async with Supervisor() as supervisor:
        await supervisor.start(child)
        waiting = asyncio.create_task(supervisor.wait(child.name))
        shown = child.log_offset
        while True:
            is_done = waiting.done()
            text = _text_after(child.log_path, shown)
            shown += len(text)
            for line in _messages(text):
                say(console, f"warm start: {line}")
            if is_done:
                return waiting.result()
            await asyncio.wait({waiting}, timeout=_POLL_SECONDS)


def _text_after(path: Path, offset: int) -> bytes:
    """Return the whole lines of a file after an offset."""
    with path.open("rb") as log:
        log.seek(offset)
        text = log.read()
    return text[: text.rfind(b"\n") + 1]


def _messages(text: bytes) -> Iterator[str]:
    for line in text.decode(errors="replace").splitlines():
        found = _LOG_LINE.match(line)
        if found is not None:
            yield found[1]
