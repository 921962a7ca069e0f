"""The process behind `agentrl serve`: keeps one server it starts, or several given as URLs."""

import asyncio
import logging
from pathlib import Path

from agentrl.config.sections import RootConfig
from agentrl.inference.supervisor.server_commands import check_keys
from agentrl.inference.supervisor.server_supervisor import ServerKeeper, ServerPlan
from agentrl.models.resolve import resolve_model
from agentrl.runtime.signals import stop_on_signals
from agentrl.store import TrajectoryStore

logger = logging.getLogger(__name__)

MAX_RESTARTS = 5
START_SECONDS = {"embedded": 120.0, "sglang": 1800.0}


async def run_server(config: RootConfig, uri: str) -> None:
    """Keep this process's servers until SIGTERM or SIGINT; a second one ends the process at once.

    Raises:
        ConfigError: the model is not there, no port is free, or a key is missing.
        InferenceError: a server did not start, or died too often.
        StoreError: the store is unreachable.
    """
    stop = stop_on_signals("the server is ended first")
    plans = _plans(config)
    async with TrajectoryStore.connect(uri, database=config.run.run_name) as store:
        keepers = [
            ServerKeeper(
                store,
                plan,
                model=config.model,
                inference=config.inference,
                publish=config.publish,
            )
            for plan in plans
        ]
        async with asyncio.TaskGroup() as group:
            for keeper in keepers:
                group.create_task(
                    keeper.run(
                        stop,
                        max_restarts=MAX_RESTARTS,
                        start_seconds=START_SECONDS[config.inference.inference_backend],
                    )
                )


def _plans(config: RootConfig) -> list[ServerPlan]:
    run, given = config.run, config.inference.inference_urls
    name = config.model.model_name_or_path
    if not given:
        check_keys(config.inference)
    # Who only watches servers needs no weights, which may be large and not here.
    model_path = Path(name) if given else resolve_model(name)
    urls: tuple[str | None, ...] = given or (None,)
    return [
        ServerPlan(
            url=url,
            model_path=model_path,
            log_prefix=str(run.logs_dir / f"{run.run_name}_engine_"),
            seed=run.seed,
        )
        for url in urls
    ]
