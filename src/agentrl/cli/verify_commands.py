"""Commands that verify: repeated optimizer steps, and merged training against separate turns."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from agentrl.cli.databases import served_uri, trained_run
from agentrl.config.command_line import Count, FlagCommand, FlagGroup, Steps, given_flags
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


@click.group("verify", cls=FlagGroup, sections=("run", "model"))
def verify() -> None:
    """Check that merged training is exact."""


@verify.command("merge")
@click.option("--trees", type=Count(), default=8, help="Random trees to compare on. [8]")
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32"]),
    default="float64",
    help="Precision of the comparison. [float64]",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object; `max_relative_gradient_error` is the figure.",
)
def verify_merge(
    config: RootConfig, trees: int, dtype: Literal["float64", "float32"], as_json: bool
) -> int:
    """Compare the gradients of merged and separate turns; the exit status is 1 if they differ.

    Without --model_name_or_path, small random models are compared.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from agentrl.distributed import Ranks
    from agentrl.models.checkpoints.resolve import resolve_model
    from agentrl.models.load import load_policy
    from agentrl.trainer.learner.merge_check import check_random_trees, small_random_policies

    disable_progress_bar()
    if config.trainer.trainer_threads is not None:
        torch.set_num_threads(config.trainer.trainer_threads)
    precision, device = getattr(torch, dtype), Ranks().device
    if "model_name_or_path" in config.model.model_fields_set:
        model = config.model.model_name_or_path
        path = resolve_model(model)
        trust = config.model.trust_remote_code
        policies = [load_policy(path, dtype=precision, device=device, trust_remote_code=trust)]
    else:
        model = "random Qwen3 and Llama of two layers"
        policies = small_random_policies(precision, device)
    found = check_random_trees(policies, seed=config.run.seed, trees=trees)
    report = {
        **asdict(found),
        "equal": found.is_equal,
        "dtype": dtype,
        "seed": config.run.seed,
        "model": model,
    }
    if as_json:
        print(json.dumps(report))
    else:
        print(
            f"{found.trees} random trees, {model}, {dtype}: "
            f"{found.tokens_separate} tokens as {found.tokens_merged}; largest relative gradient "
            f"error {found.max_relative_gradient_error:.2g}, "
            f"{'within' if found.is_equal else 'BEYOND'} {found.tolerance:g}"
        )
    return 0 if found.is_equal else 1
