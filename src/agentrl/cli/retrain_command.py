"""`agentrl retrain`: a run's steps made again without some records."""

import json
import os
import subprocess
import sys

import click

from agentrl.cli.databases import served_uri, trained_run
from agentrl.config.command_line import FlagCommand, given_flags
from agentrl.config.loading import secret_environment
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.runtime.printable import counted, one_line
from agentrl.runtime.processes.signals import INTERRUPTED


@click.command("retrain", cls=FlagCommand, sections=("run", "store"))
@click.argument("run_name_or_dir", metavar="RUN")
@click.option(
    "--without",
    metavar="CONDITION",
    default="",
    help="Records to leave out, such as 'score.detail ~ \"timeout\"'; by default none.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def retrain(
    context: click.Context, config: RootConfig, run_name_or_dir: str, without: str, as_json: bool
) -> int:
    """Make a run's steps again without the records of a condition, and compare held-out scores.

    RUN is the run's name, or its output directory; --run_name names the new weights and their ledger.
    The steps begin at the last checkpoint before the first that trained on such a record, and nothing
    is sampled; without a condition, they are the run's own, bit for bit on a CPU. The same command
    goes on after a kill.
    """
    given = given_flags(context)
    if "run_name" not in given:
        raise ConfigError("name the new weights: --run_name clean")
    name, output_path = config.run.run_name, config.run.output_path
    section = config.run.model_copy(update={"output_dir": None})
    typed = {flag: given[flag] for flag in given.keys() - {"config", "run_name", "output_dir"}}
    run = trained_run(config.model_copy(update={"run": section}), run_name_or_dir, typed)
    from agentrl.trainer.rl.retrain import retrain

    with served_uri(run) as uri:
        report = retrain(run, uri, name, output_path, without)
    if report is None:
        return 0
    if report.is_stopped:
        print(f"{name}: stopped; the same command goes on")
        return INTERRUPTED
    scores = {report.origin.run: report.held_out}
    if report.held_out is not None and report.model is not None:
        # In processes of its own, with a database of its own.
        flags = ("--config", str(output_path / "config.yaml"), "--output_dir", str(output_path))
        command = ("agentrl", "eval", *flags, "--run_name", name)
        environment = {**os.environ, **secret_environment(run)}
        words = [sys.executable, "-m", *command]
        if subprocess.run(words, stdout=sys.stderr, env=environment, check=False).returncode:
            raise ConfigError(f"the weights are made; evaluate them again: {' '.join(command)}")
        scores[name] = json.loads((output_path / "eval.json").read_text())["reward_mean"]
    if as_json:
        print(json.dumps({**report.model_dump(mode="json"), "held_out": scores}))
        return 0
    print(
        f"{name} repeats {one_line(str(report.origin))}\n"
        f"{counted(len(report.steps), 'step')} made again, up to step {report.origin.last_step}\n"
        f"left out: {counted(report.num_records, 'record')} of {counted(report.num_groups, 'group')} "
        f"in {counted(report.num_steps, 'step')}; nothing left of "
        f"{counted(report.num_emptied_groups, 'group')} and "
        f"{counted(len(report.emptied_steps), 'step')}\n"
        f"weights: {report.model}"
    )
    if name in scores:
        print("held-out score: " + ", ".join(f"{one} {scores[one]:.3f}" for one in scores))
    return 0
