"""Commands that create a project, start processes, or process a run's weights.

Each function takes the configuration and its own options and returns an exit status. Further
imports are made inside each command, which keeps `--help` fast.
"""

import atexit
import json
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import click

from agentrl.cli.databases import joined, store_uri
from agentrl.cli.one_rank import log_by_rank, refuse_placement_flags
from agentrl.config.command_line import FlagCommand, given_flags
from agentrl.config.loading import load_config, read_yaml
from agentrl.config.named_files import existing_or_shipped, shipped_file
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.plugin_registry import required_hook
from agentrl.runtime.processes.memory import frozen_imports
from agentrl.runtime.processes.signals import INTERRUPTED, NO_SIGNAL

DEMO_CONFIG = "assets/demo/grpo.yaml"
PROJECT = "examples/project"
_SAMPLING = ("run", "model", "store", "data", "sampling", "rollout", "tools", "agents", "inference")
_TRAINING = (
    *("run", "model", "store", "data", "sampling", "rollout", "inference"),
    *("algorithm", "trainer", "publish"),
)


@click.command("init", cls=FlagCommand, sections=())
@click.argument("folder")
def init(config: RootConfig, folder: str) -> int:
    """Create a project in FOLDER: a tool server, questions, a scorer and a configuration.

    It is ready to train; its README.md explains what to change. FOLDER must be new or empty, except
    for names that start with a dot.
    """
    if not folder:
        raise ConfigError("FOLDER is empty; use a dot for the current folder: agentrl init .")
    target = Path(os.path.expanduser(folder))
    try:
        target.mkdir(parents=True, exist_ok=True)
        found = sorted(path.name for path in target.iterdir() if path.name[:1] != ".")
        if found:
            raise ConfigError(f"{target} already contains {found[0]}; choose an empty folder")
        files = sorted(path for path in shipped_file(PROJECT).iterdir() if path.is_file())
        for path in files:
            shutil.copyfile(path, target / path.name)
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}; choose another folder") from None
    print(f"{target} has {', '.join(path.name for path in files)}\nTrain it:")
    print(f"  cd {shlex.quote(str(target))}\n  agentrl run --config config.yaml")
    return 0


@click.command("run", cls=FlagCommand)
@click.option(
    "--dry_run",
    is_flag=True,
    help="Start nothing: print every value with its origin, the processes, the GPUs and the "
    "results of the checks; the exit status is 2 if the run could not start.",
)
@click.option("--json", "as_json", is_flag=True, help="With --dry_run: print one JSON object.")
@click.pass_context
async def run(context: click.Context, config: RootConfig, dry_run: bool, as_json: bool) -> int:
    """Train on this machine: start the store, servers, samplers and trainer, and show progress.

    Ctrl-C stops all of them; the same command resumes the run. Without a model and questions, the
    demo is trained.
    """
    given = given_flags(context)
    config, is_demo = _or_demo(given, config, "train_file")
    config = _with_agent(config, writes=not dry_run)
    if dry_run:
        from agentrl.launcher.run_plan import plan_run

        plan = await plan_run(config, {"config": DEMO_CONFIG, **given} if is_demo else given)
        print(json.dumps(plan.parts(), indent=2) if as_json else "\n".join(plan.lines()))
        return 0 if plan.can_start else ConfigError.exit_status
    if as_json:
        raise ConfigError("--json requires --dry_run")
    from agentrl.launcher.training_run import run_training

    return await run_training(config)


@click.command("sample", cls=FlagCommand, sections=_SAMPLING)
def sample(config: RootConfig) -> int:
    """Run one sampler process; start as many as you like, on any host."""
    config = _with_agent(joined(config))
    from agentrl.runtime.logs import setup_logging

    with frozen_imports():
        from agentrl.rollout.worker.sampler_process import run_sampler

    setup_logging("sampler")
    return run_sampler(config)


@click.command("train", cls=FlagCommand, sections=_TRAINING)
@click.pass_context
def train(context: click.Context, config: RootConfig) -> int:
    """Run the trainer; under `accelerate launch` or `torchrun` this is one rank of several."""
    refuse_placement_flags(context)
    config = joined(config)
    log_by_rank(config.run)
    with frozen_imports():
        from agentrl.trainer.rl.training_loop import train

    result = train(config)
    statuses = {"stopped": INTERRUPTED, "no_signal": NO_SIGNAL}
    return 0 if result is None else statuses.get(result.status, 0)


@click.command("serve", cls=FlagCommand, sections=("run", "model", "store", "inference", "publish"))
@click.pass_context
async def serve(context: click.Context, config: RootConfig) -> int:
    """Start an inference server, register it with the run and keep its weights up to date."""
    refuse_placement_flags(context)
    uri = store_uri(config)
    from agentrl.inference.supervisor.server_supervisor import run_server
    from agentrl.runtime.logs import setup_logging

    setup_logging("serve")
    await run_server(config, uri)
    return 0


@click.command("eval", cls=FlagCommand, sections=_SAMPLING)
@click.pass_context
async def evaluate(context: click.Context, config: RootConfig) -> int:
    """Score the run's newest checkpoint, or the model that --model_name_or_path names.

    With --evaluated_route, any model with an OpenAI-compatible chat API is scored instead. Without a model and questions, the demo is evaluated.
    """
    from agentrl.launcher.evaluation_run import newest_checkpoint, run_evaluation

    # Only the command line counts: the run's configuration file names the model of its first start.
    given = given_flags(context)
    config, _ = _or_demo(given, config, "eval_file")
    is_named = "model_name_or_path" in given or config.agents.evaluated_route is not None
    checkpoint = None if is_named else newest_checkpoint(config.run.output_path)
    return await run_evaluation(_with_agent(config), checkpoint)


@click.command("doctor", cls=FlagCommand)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
@click.pass_context
async def doctor(context: click.Context, config: RootConfig, as_json: bool) -> int:
    """Check this machine for a run with these flags; each failing line says what to do.

    The exit status is 1 if a requirement is missing. Without a model and questions, the
    requirements of the demo are checked. Nothing of the run is started.
    """
    from agentrl.config.secrets import redact
    from agentrl.launcher.doctor import examine

    config, _ = _or_demo(given_flags(context), config, "train_file")
    config = _with_agent(config, writes=False)
    num_failures = 0
    async for check in examine(config):
        text = redact(check.text)
        if as_json:
            line = json.dumps({"state": check.state, "subject": check.subject, "text": text})
        else:
            line = f"{check.state:5} {check.subject:16} {text}"
        print(line, flush=True)
        num_failures += check.state == "FAIL"
    return 1 if num_failures else 0


@click.command("export", cls=FlagCommand, sections=("run", "model"))
def export(config: RootConfig) -> int:
    """Merge the newest checkpoint's adapter (LoRA) into its base model.

    The checkpoint is read from --output_dir, and the result is written there as `merged`. Give
    --model_name_or_path only if the base model was moved.
    """
    from transformers.utils.logging import disable_progress_bar

    from agentrl.launcher.evaluation_run import newest_checkpoint
    from agentrl.models.checkpoints.adapter_files import is_adapter, read_shape
    from agentrl.models.checkpoints.resolve import resolve_model
    from agentrl.models.lora import merge_adapter

    disable_progress_bar()
    adapter = newest_checkpoint(config.run.output_path)
    if not is_adapter(adapter):
        raise ConfigError(f"{adapter} already contains all weights")
    is_moved = "model_name_or_path" in config.model.model_fields_set
    base = config.model.model_name_or_path if is_moved else read_shape(adapter).base
    target: Path = merge_adapter(adapter, resolve_model(base), config.run.output_path / "merged")
    print(f"merged {adapter} into {base}: {target}")
    return 0


def _or_demo(
    given: Mapping[str, str], config: RootConfig, questions: str
) -> tuple[RootConfig, bool]:
    """Return the configuration, or the demo's if the user gave none, and whether it is the demo's.

    A private database without an output directory rules out the demo, because it contains questions
    that the user added.
    """
    own_flags = {"config", "model_name_or_path", "db_connection_string", questions}
    output, database = config.run.output_path, config.private_mongo_dir
    own_flags |= {"env", "eval_env"}
    if not own_flags.isdisjoint(given) or "MONGODB_URI" in os.environ:
        return config, False
    if not output.exists() and database.exists():
        return config, False
    demo = load_config({"config": DEMO_CONFIG, **given})
    config_path = output / "config.yaml"
    if config_path.exists():
        trained_model = read_yaml(config_path).get("model_name_or_path")
        # A model that ships with the package may have been named from another folder.
        demo_model = demo.model.model_name_or_path
        if (
            trained_model is not None
            and str(existing_or_shipped(Path(trained_model))) != demo_model
        ):
            raise ConfigError(
                f"run {config.run.run_name!r} trains {trained_model}: give --config {config_path} "
                f"with --{questions}, or another --run_name for the demo"
            )
    sys.stderr.write(f"note: no model and no questions given; running --config {DEMO_CONFIG}\n")
    return demo, True


def _with_agent(config: RootConfig, *, writes: bool = True) -> RootConfig:
    """Return the configuration with an agent of `--agent_python` made callable from here.

    Unless it `writes`, the files for it are deleted when this process ends.
    """
    if config.agents.agent_python is None:
        return config
    folder = Path(".agentrl/agents") / config.run.run_name
    if not writes:
        folder = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    resolved: RootConfig = required_hook("agent_interpreters", "agent_python", "agent_python")(
        config, folder
    )
    return resolved
