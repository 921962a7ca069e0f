"""Compares two models, one after the other, in the places that a run stored; stores the result."""

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.cli.databases import served_uri, trained_run
from agentrl.config.loading import load_config
from agentrl.config.named_files import existing_or_shipped
from agentrl.config.sections import AlgorithmSection, RootConfig
from agentrl.distributed import Ranks
from agentrl.errors import ConfigError
from agentrl.inference.teaching.vocabularies import check_same_tokens
from agentrl.models.checkpoints.adapter_files import is_adapter, read_shape
from agentrl.models.checkpoints.architectures import check_can_be_computed, raw_config
from agentrl.models.checkpoints.resolve import resolve_model, resolve_tokenizer
from agentrl.plugins.inspector.fork_run import version_paths
from agentrl.plugins.inspector.policy_diff import PolicyDiff, policy_diff
from agentrl.plugins.inspector.stored_decisions import read_decisions
from agentrl.renderers.renderer import Renderer
from agentrl.store import TrajectoryStore
from agentrl.store.views.record_condition import record_condition
from agentrl.trainer.bootstrap import rank_of
from agentrl.trainer.learner.settings import StartWeights
from agentrl.trainer.rl.step_groups import RecordImages, image_reader
from agentrl.trainer.turn_scores import score_turns


def diff_policies(
    run: str,
    start: str | int,
    end: str | int,
    *,
    where: str = "",
    limit: int = 2000,
    **flags: str,
) -> PolicyDiff:
    """Return what two models would decide differently where a run decided, and store it with the run.

    Args:
        run: its name, or its output directory.
        start: policy version of the run, or directory or name of a model with its tokenizer.
        end: the same of the other model.
        where: condition on the records, as `agentrl retrain --without` has them; empty: all.
        limit: most records to read, those that `start` sampled, or versions near it, first.
        flags: of the configuration, such as `db_connection_string` or `torch_dtype`.

    Raises:
        ConfigError: there is no such run, model or record.
        StoreError: the database does not respond.
    """
    condition = record_condition(where) if where else {}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("agentrl diff is one process; start it without torchrun or accelerate")
    config = trained_run(load_config(flags), run, flags)
    # Nothing is trained, so the run's own functions are not called; nor are there samplers beside it.
    threads = {} if "trainer_threads" in flags else {"trainer_threads": None}
    trainer = config.trainer.model_copy(update=threads)
    config = config.model_copy(update={"algorithm": AlgorithmSection(), "trainer": trainer})
    names = {"run": config.run.run_name, "start": str(start), "end": str(end), "where": where}
    with served_uri(config) as uri, rank_of(config) as ranks:
        return asyncio.run(_compared(config, ranks, uri, names, condition, limit))


async def _compared(
    config: RootConfig, ranks: Ranks, uri: str, names: dict[str, str], condition: Any, limit: int
) -> PolicyDiff:
    async with TrajectoryStore.connect(uri, config.run.run_name) as store:
        versions, _ = await version_paths(config, store)
        files = resolve_tokenizer(config.model.model_name_or_path)
        models = [
            await asyncio.to_thread(_model, config, versions, given, files)
            for given in (f"--from {names['start']}", f"--to {names['end']}")
        ]
        parser = config.inference.tool_call_parser
        renderer = Renderer.of_policy(config.model, files, tool_call_parser=parser)
        images = RecordImages(store, image_reader(models[0][1].model_path, config.model))
        version = int(names["start"]) if names["start"].isdecimal() else None
        records = await store.reports.sampled_near(condition, version, limit=limit)
        book = await read_decisions(store, renderer, images, records)
        scored = [await score_turns(own, ranks, weights, book.turns) for own, weights in models]
        found = await asyncio.to_thread(policy_diff, names, book, scored)
        await store.figures.put_diff(asdict(found))
    return found


def _model(
    config: RootConfig, versions: dict[int, Path], given: str, files: Path
) -> tuple[RootConfig, StartWeights]:
    """Return how to load the model that a flag names: a version of the run, or any other.

    Raises:
        ConfigError: there is none, it cannot be computed, or its tokens are not those of the run.
    """
    flag, _, name = given.partition(" ")
    if name.isdecimal():
        if int(name) not in versions:
            known = ", ".join(map(str, sorted(versions)))
            raise ConfigError(f"{given}: the run has no files of this version; available: {known}")
        path = versions[int(name)]
    else:
        path = existing_or_shipped(Path(name).expanduser())
        path = path if is_adapter(path) else resolve_model(str(path), flag=flag.strip("-"))
    adapter: Path | None = None
    changes: dict[str, Any] = {"lora_rank": 0, "model_name_or_path": str(path)}
    if is_adapter(path):
        shape, adapter = read_shape(path), path
        path = resolve_model(shape.base)
        changes |= {"lora_rank": shape.rank, "lora_alpha": shape.alpha}
        changes |= {"lora_target_modules": shape.target_modules, "model_name_or_path": shape.base}
    model = config.model.model_copy(update=changes)
    check_can_be_computed(path, raw_config(path), trust_remote_code=model.trust_remote_code)
    check_same_tokens(given, path, files)
    return config.model_copy(update={"model": model}), StartWeights(path, adapter)
