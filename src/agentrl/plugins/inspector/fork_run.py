"""`agentrl fork`: continues a stored record from one of its turns, on the run's servers or its own.

The servers and tools of a running run are used. If none serves the requested version (the run has
ended, or has moved on), one server is started with the version's files for the duration of the
fork, together with the run's tool server.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError
from agentrl.inference import ServerPool
from agentrl.inference.supervisor.server_supervisor import lone_server
from agentrl.inference.weight_sync import AdapterNames
from agentrl.launcher.cluster.local_cluster import LocalCluster
from agentrl.models.checkpoints.adapter_files import is_adapter
from agentrl.models.checkpoints.resolve import resolve_model
from agentrl.rollout.worker.fork_player import play, store_fork
from agentrl.rollout.worker.resources import open_context, tools_config, tools_of
from agentrl.rollout.worker.sampler_process import open_scoring
from agentrl.runtime.processes.process_identity import this_user
from agentrl.schema import Fork, InferenceService, Message, Record
from agentrl.schema.fork import check_fork_turn, shown_before
from agentrl.schema.lost_versions import LostVersions, version_of
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.forks import new_fork_id
from agentrl.store.repositories.liveness import ALIVE_SECONDS
from agentrl.store.views.reports import RecordDetail
from agentrl.tools import probe

REFRESH_SECONDS = 1.0
_ROLES = ("system", "user", "tool")


@dataclass(frozen=True)
class ForkRequest:
    """The requested fork."""

    record_id: str
    turn: int
    version: int | None = None
    """None for the version that the run's servers serve, or else the newest one available."""
    messages: tuple[Message, ...] | None = None
    num_tries: int = 1
    sampling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Weights:
    """Files of a version."""

    version: int
    path: Path
    adapter: str | None


async def run_fork(
    config: RootConfig, request: ForkRequest, *, on_stored: Callable[[Fork, Sequence[str]], None]
) -> AsyncIterator[Record]:
    """Run a fork, and yield its rollouts as they end."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(config, role="fork"))
        store = await cluster.open_store()
        detail = await store.holding(request.record_id).reports.record_detail(request.record_id)
        check_fork_turn(detail.turns, request.turn)
        serving = await _serving(store, request.version)
        weights = None if serving else await weights_of(cluster.config, store, request.version)
        await _ensure_tool_server(cluster)
        if weights is None:
            version = max(one.policy_version for one in serving)
        else:
            version = weights.version
            server = await stack.enter_async_context(
                lone_server(
                    cluster.config,
                    weights.path,
                    version=version,
                    adapter=weights.adapter,
                    log_name="fork_engine",
                )
            )
            serving = [server]
        scoring, summarizer = await stack.enter_async_context(open_scoring(cluster.config))
        context = await stack.enter_async_context(open_context(cluster.config, scoring, summarizer))
        context.servers.update(serving)
        if weights is None:
            follower = asyncio.create_task(_follow(store, context.servers, request.version))
            stack.callback(follower.cancel)
        fork = await _new_fork(store, request, detail, version)
        task = await store_fork(store, fork, detail.task, request.num_tries)
        on_stored(fork, [f"{fork.id}/{number}" for number in range(request.num_tries)])
        tools = tools_of(cluster.config)
        stateless = cluster.config.tools.resumable_tools or tools.is_resumable
        async for record in play(
            context,
            fork,
            task,
            detail.turns,
            tools_keep_state=bool(tools.servers) and not stateless,
            by_agent=config.agents.has_agent,
            max_running=config.rollout.max_concurrent_samples_per_process,
        ):
            yield record


def edited_messages(edit: Any) -> tuple[Message, ...]:
    """Return the messages of an edit."""
    if not isinstance(edit, dict) or set(edit) != {"messages"}:
        keys = f", not {', '.join(map(repr, edit))}" if isinstance(edit, dict) else ""
        raise ConfigError(f'an edit must be a JSON object with the single key "messages"{keys}')
    messages = edit["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError('"messages" must be a non-empty list of messages')
    for number, message in enumerate(messages):
        label = f"message {number}"
        if not isinstance(message, dict):
            raise ConfigError(f"{label} is not a JSON object")
        unknown = sorted(set(message) - {"role", "content", "tool_call_id", "name"})
        if unknown:
            raise ConfigError(
                f"{label}: unknown key {unknown[0]!r}; a message has role and content, and a tool "
                "message also tool_call_id and name"
            )
        if message.get("role") not in _ROLES:
            raise ConfigError(
                f"{label}: unknown role {str(message.get('role'))[:40]!r}; expected one of "
                f"{', '.join(_ROLES)}"
            )
        if not isinstance(message.get("content"), str | list):
            raise ConfigError(f"{label}: content must be text")
        if message["role"] == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise ConfigError(f"{label}: a tool message needs a tool_call_id")
    return tuple(messages)


async def messages_of_turn(store: TrajectoryStore, record_id: str, turn: int) -> list[Message]:
    """Return the messages that a turn added to the turn that it continues, for editing."""
    detail = await store.holding(record_id).reports.record_detail(record_id)
    check_fork_turn(detail.turns, turn)
    return shown_before(detail.turns, turn)


async def _serving(store: TrajectoryStore, version: int | None) -> list[InferenceService]:
    """Return the run's live servers that serve a version, or any version if none is requested."""
    services = await store.services.all(alive_within=ALIVE_SECONDS)
    return [
        one for one in services if one.status != "down" and version in (None, one.policy_version)
    ]


async def _follow(store: TrajectoryStore, servers: ServerPool, version: int | None) -> None:
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        servers.update(await _serving(store, version))


async def version_paths(
    config: RootConfig, store: TrajectoryStore
) -> tuple[dict[int, Path], Sequence[LostVersions]]:
    """Return the files of all versions, and the lost ones.

    They are published ones, a checkpoint's, or the first weights.
    """
    run = await store.runs.get()
    lost = () if run is None else run.lost_versions
    paths = {0: resolve_model(config.model.model_name_or_path)}
    for path in (config.run.output_path / "checkpoints").glob("[0-9]*/model"):
        if any(path.glob("*config.json")):
            paths[version_of(int(path.parent.name), lost)] = path
    for policy in await store.policies.all():
        path = Path(policy.path)
        if policy.is_written and any(path.glob("*config.json")):
            paths[policy.version] = path
    return paths, lost


async def weights_of(config: RootConfig, store: TrajectoryStore, version: int | None) -> _Weights:
    """Return the files of a version; None: of the newest available one."""
    paths, lost = await version_paths(config, store)
    kept = [number for number in paths if not any(one.after < number <= one.last for one in lost)]
    chosen = max(kept) if version is None else version
    if chosen not in paths:
        known = ", ".join(map(str, sorted(paths)))
        raise ConfigError(
            f"--version {chosen}: no server serves it and its files were deleted; available: "
            f"{known}"
        )
    path = paths[chosen]
    name = AdapterNames(config.run.run_name).of(chosen) if is_adapter(path) else None
    return _Weights(chosen, path, name)


async def _ensure_tool_server(cluster: LocalCluster) -> None:
    """Start the run's tool server unless it is already running, as in a live run."""
    tools = cluster.config.tools
    if tools.tool_server_url is not None:
        try:
            await probe(tools_config(tools))
        except ConfigError:
            if tools.tool_server_command is None:
                raise
        else:
            return
    await cluster.start_tool_server()


async def _new_fork(
    store: TrajectoryStore, request: ForkRequest, detail: RecordDetail, version: int
) -> Fork:
    parent = await store.forks.of_record(request.record_id)
    return Fork(
        id=new_fork_id(request.record_id, request.turn),
        record_id=request.record_id,
        attempt=detail.attempt,
        task_id=detail.record.task_id if parent is None else parent.task_id,
        turn=request.turn,
        version=version,
        messages=request.messages,
        sampling=dict(request.sampling or {}),
        created_by=this_user(),
        created_at=store.clock.now(),
    )
