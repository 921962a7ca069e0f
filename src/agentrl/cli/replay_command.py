"""`agentrl replay`: recorded optimizer steps, repeated and compared."""

import json
from pathlib import Path

import click

from agentrl.cli.databases import served_uri, trained_run
from agentrl.config.command_line import FlagCommand, Steps, given_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


@click.command("replay", cls=FlagCommand, sections=("run", "store"))
@click.argument("run_or_file", metavar="RUN_OR_FILE")
@click.option(
    "--step",
    "steps",
    type=Steps(),
    help="Step (7) or steps (3-7); by default all steps of a bundle.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def replay(
    context: click.Context,
    config: RootConfig,
    run_or_file: str,
    steps: tuple[int, int] | None,
    as_json: bool,
) -> int:
    """Repeat optimizer steps of a run from its database and checkpoints, and compare the results.

    RUN_OR_FILE is the run's name, its output directory, or a file of `agentrl store bundle`. Functions
    of your own that a file, or the run's database of an earlier start, names must be given again. Loss,
    gradient norm, learning rate, advantages, importance ratios and checkpointed weights are
    bit-identical on the machine and mesh that trained them. The exit status is 1 if one differs.
    """
    from agentrl.trainer.rl.bundle import bundled_store, unpacked
    from agentrl.trainer.rl.replay import replay

    given = {name: value for name, value in given_flags(context).items() if name != "config"}
    if Path(run_or_file).is_file():
        with unpacked(Path(run_or_file), given) as bundle, bundled_store(bundle.config) as uri:
            found = replay(bundle.config, uri, *(steps or bundle.steps)) or []
    elif steps is None:
        raise ConfigError("give a --step of the run, such as 7 or 3-7")
    else:
        run = trained_run(config, run_or_file, given)
        with served_uri(run) as uri:
            found = replay(run, uri, *steps) or []
    if as_json:
        print(json.dumps({"steps": [step.as_json() for step in found]}))
    else:
        for step in found:
            equal = "equal" if step.equal else "DIFFERENT"
            print(f"step {step.step}: {equal}, weights {step.weights}")
            for difference in step.differences:
                print(
                    f"  {difference.what}: recorded {difference.recorded}, replayed {difference.replayed}"
                )
    return 0 if all(step.equal for step in found) else 1
