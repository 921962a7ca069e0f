"""`agentrl fork`: continues a stored record from one of its turns, on the run's servers or its own.

The servers and tools of a running run are used. If none serves the requested version (the run has
ended, or has moved on), one server is started with the version's files for the duration of the
fork, together with the run's tool server.
"""

import asyncio
import getpass
import socket
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
from agentrl.launcher.local_cluster import LocalCluster
from agentrl.models.adapter_files import is_adapter
from agentrl.models.resolve import resolve_model
from agentrl.rollout.worker.fork_player import play, store_fork
from agentrl.rollout.worker.resources import open_context, tools_config
from agentrl.rollout.worker.sampler_process import open_judgment
from agentrl.schema import Fork, InferenceService, Message, Record
from agentrl.schema.fork import check_fork_turn, shown_before
from agentrl.store import TrajectoryStore
from agentrl.store.repositories.forks import new_fork_id
from agentrl.store.repositories.living import ALIVE_SECONDS
from agentrl.store.repositories.reports import RecordDetail
from agentrl.tools import probe

REFRESH_SECONDS = 1.0
_ROLES = ("system", "user", "tool")


@dataclass(frozen=True)
class WantedFork:
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
    config: RootConfig, wanted: WantedFork, *, when_begun: Callable[[Fork, Sequence[str]], None]
) -> AsyncIterator[Record]:
    """Run a fork, and yield its rollouts as they end.

    Args:
        config: configuration of the run, with its database.
        wanted: the requested fork.
        when_begun: called with the fork and the ids of its records as soon as they are stored.

    Raises:
        ConfigError: the fork cannot run as requested.
        StoreError: the record does not exist.
        InferenceError: no server serves the version, and none could be started.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(LocalCluster(config, role="fork"))
        store = await cluster.open_store()
        detail = await store.holding(wanted.record_id).reports.record_detail(wanted.record_id)
        check_fork_turn(detail.turns, wanted.turn)
        serving = await _serving(store, wanted.version)
        weights = None if serving else await weights_of(cluster.config, store, wanted.version)
        await _reach_tools(cluster)
        if weights is None:
            version = max(one.policy_version for one in serving)
        else:
            version = weights.version
            server = await stack.enter_async_context(
                lone_server(cluster.config, weights.path, version=version, adapter=weights.adapter)
            )
            serving = [server]
        scoring, summarizer = await stack.enter_async_context(open_judgment(cluster.config))
        context = await stack.enter_async_context(open_context(cluster.config, scoring, summarizer))
        context.servers.update(serving)
        if weights is None:
            following = asyncio.create_task(_follow(store, context.servers, wanted.version))
            stack.callback(following.cancel)
        fork = await _fork(store, wanted, detail, version)
        task = await store_fork(store, fork, detail.task, wanted.num_tries)
        when_begun(fork, [f"{fork.id}/{number}" for number in range(wanted.num_tries)])
        tools = tools_config(cluster.config.tools)
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


def edited_messages(given: Any) -> tuple[Message, ...]:
    """Return the messages of an edit.

    Args:
        given: the parsed JSON: `{"messages": [{"role": ..., "content": ...}]}`.

    Raises:
        ConfigError: it is malformed; the message names the place.
    """
    if not isinstance(given, dict) or set(given) != {"messages"}:
        keys = f", not {', '.join(map(repr, given))}" if isinstance(given, dict) else ""
        raise ConfigError(f'an edit must be a JSON object with the single key "messages"{keys}')
    messages = given["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError('"messages" must be a non-empty list of messages')
    for number, one in enumerate(messages):
        where = f"message {number}"
        if not isinstance(one, dict):
            raise ConfigError(f"{where} is not a JSON object")
        unknown = sorted(set(one) - {"role", "content", "tool_call_id", "name"})
        if unknown:
            raise ConfigError(
                f"{where}: unknown key {unknown[0]!r}; a message has role and content, and a tool "
                "message also tool_call_id and name"
            )
        if one.get("role") not in _ROLES:
            raise ConfigError(
                f"{where}: unknown role {str(one.get('role'))[:40]!r}; expected one of "
                f"{', '.join(_ROLES)}"
            )
        if not isinstance(one.get("content"), str | list):
            raise ConfigError(f"{where}: content must be text")
        if one["role"] == "tool" and not isinstance(one.get("tool_call_id"), str):
            raise ConfigError(f"{where}: a tool message needs a tool_call_id")
    return tuple(messages)


async def messages_of_turn(store: TrajectoryStore, record_id: str, turn: int) -> list[Message]:
    """Return the messages that a turn added to the turn that it continues, for editing.

    Raises:
        ConfigError: the record has no such turn.
        StoreError: the record does not exist.
    """
    detail = await store.holding(record_id).reports.record_detail(record_id)
    check_fork_turn(detail.turns, turn)
    return shown_before(detail.turns, turn)


async def _serving(store: TrajectoryStore, version: int | None) -> list[InferenceService]:
    """Return the run's live servers that serve a version, or any version if none is requested."""
    found = await store.services.all(alive_within=ALIVE_SECONDS)
    return [one for one in found if one.status != "down" and version in (None, one.policy_version)]


async def _follow(store: TrajectoryStore, servers: ServerPool, version: int | None) -> None:
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        servers.update(await _serving(store, version))


async def weights_of(config: RootConfig, store: TrajectoryStore, version: int | None) -> _Weights:
    """Return the files of a version: published ones, a checkpoint's, or the first weights.

    Args:
        config: of the run.
        store: of the run.
        version: None for the newest that there is.

    Raises:
        ConfigError: there are none; the message lists the available versions.
    """
    found = {0: resolve_model(config.model.model_name_or_path)}
    for path in (config.run.output_path / "checkpoints").glob("[0-9]*/model"):
        if any(path.glob("*config.json")):
            found[int(path.parent.name)] = path
    for policy in await store.policies.all():
        path = Path(policy.path)
        if policy.is_written and any(path.glob("*config.json")):
            found[policy.version] = path
    wanted = max(found) if version is None else version
    if wanted not in found:
        known = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"--version {wanted}: no server serves it and its files were deleted; available: "
            f"{known}"
        )
    path = found[wanted]
    name = AdapterNames(config.run.run_name).of(wanted) if is_adapter(path) else None
    return _Weights(wanted, path, name)


async def _reach_tools(cluster: LocalCluster) -> None:
    """Start the run's tool server unless it is already up, as in a live run."""
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


async def _fork(
    store: TrajectoryStore, wanted: WantedFork, detail: RecordDetail, version: int
) -> Fork:
    parent = await store.forks.of_record(wanted.record_id)
    return Fork(
        id=new_fork_id(wanted.record_id, wanted.turn),
        record_id=wanted.record_id,
        attempt=detail.attempt,
        task_id=detail.record.task_id if parent is None else parent.task_id,
        turn=wanted.turn,
        version=version,
        messages=wanted.messages,
        sampling=dict(wanted.sampling or {}),
        created_by=f"{getpass.getuser()}@{socket.gethostname()}",
        created_at=store.clock.now(),
    )
