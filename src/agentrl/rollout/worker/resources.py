"""Builds what all rollouts of a process share from the configuration."""

import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig, ToolsSection
from agentrl.errors import ConfigError
from agentrl.inference import ServerPool
from agentrl.models.resolve import resolve_model
from agentrl.renderers.renderer import Renderer
from agentrl.rollout.context import RolloutContext, Scoring, Summarizer
from agentrl.schema import MCPTask, Score
from agentrl.store import TrajectoryStore
from agentrl.tools import ToolsConfig, ToolSpec, connect_tools, load_mcp_servers

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_context(
    config: RootConfig, scoring: Scoring | None = None, summarizer: Summarizer | None = None
) -> AsyncIterator[RolloutContext]:
    """Connect to the store and the tools, load the renderer, and open the pool of servers.

    Raises:
        ConfigError: the model, a tool server or a setting cannot be used.
        StoreError: the store is unreachable.
    """
    uri = config.store.db_connection_string
    if uri is None:
        raise ConfigError("a sampler needs --db_connection_string (or MONGODB_URI)")
    model_dir = tokenizer_dir(config.model.model_name_or_path)
    renderer = Renderer.load(model_dir, tool_call_parser=config.inference.tool_call_parser)
    key = config.inference.inference_api_key
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name)
        )
        sees = renderer.shows_images_of("tool") and config.rollout.max_images > 0
        tools = tools_config(config.tools).model_copy(update={"show_images": sees})
        toolbox = await stack.enter_async_context(connect_tools(tools))
        check_tools(config, model_dir, renderer, toolbox.specs)
        servers = await stack.enter_async_context(
            ServerPool(
                api_key=key,
                gateway=config.inference.inference_gateway,
            )
        )
        yield RolloutContext(
            store=store,
            servers=servers,
            renderer=renderer,
            toolbox=toolbox,
            scoring=scoring or _NoScoring(),
            rollout=config.rollout,
            sampling=config.sampling,
            seed=config.run.seed,
            context_length=config.inference.context_length or _context_length(model_dir),
            router_replay=config.model.router_replay,
            resumable=_is_resumable(config, tools),
            summarizer=summarizer,
        )


def _is_resumable(config: RootConfig, tools: ToolsConfig) -> bool:
    """Return whether a dead sampler's rollout may be taken up where it stopped.

    Not where contexts are rewritten: the summaries behind a rewrite are not stored, and asking for
    them again would give another context than the one that the recorded turns saw. And not where
    somebody else's agent plays, of whose state nothing is known.
    """
    if config.agents.agent is not None:
        return False
    rewrites = config.rollout.new_context != "disabled" or config.rollout.enable_repetition_compress
    return (config.tools.resumable_tools or tools.is_resumable) and not rewrites


def tools_config(section: ToolsSection) -> ToolsConfig:
    """Return the tool servers that the flags name; none at all is allowed.

    Raises:
        ConfigError: the description of a server is malformed.
    """
    servers = {}
    if section.mcp_servers is not None:
        servers.update(load_mcp_servers(section.mcp_servers))
    if section.mcp_manager_url is not None:
        servers.update(load_mcp_servers(section.mcp_manager_url))
    names = tuple(name.strip() for name in section.mcp_server_name.split(",") if name.strip())
    return ToolsConfig(
        servers=servers,
        server_names=None if names in ((), ("all",)) else names,
        tool_names=section.mcp_tool_names or None,
        blocked_tools=section.mcp_blocked_tools,
        auth_token=section.mcp_auth_token,
        call_timeout_seconds=section.tool_timeout_seconds,
    )


def check_tools(
    config: RootConfig, model_dir: Path, renderer: Renderer, specs: Sequence[ToolSpec]
) -> None:
    """Check that the model learns of its tools and of what they return.

    Raises:
        ConfigError: its chat template shows no results, or the tools leave no room in a prompt.
    """
    if not specs:
        return
    if not renderer.traits.shows_results:
        raise ConfigError(
            "the model's chat template shows no results of tools (it refuses or leaves out messages "
            "of the role `tool`); take a model, or put a chat_template.jinja into its folder, that "
            "does, or leave the tool servers out"
        )
    if not renderer.traits.shows_tools:
        log.warning(
            "the model's chat template does not say which tools there are; the system prompt has to"
        )
    tools = [spec.openai() for spec in specs]
    num_tokens = len(renderer.render([{"role": "user", "content": "x"}], tools))
    room = config.sampling.max_prompt_tokens
    context_length = config.inference.context_length or _context_length(model_dir)
    if context_length is not None:
        room = min(room, context_length - 1)
    if num_tokens >= room:
        raise ConfigError(
            f"{len(specs)} tools take {num_tokens} tokens to describe, and a prompt may have {room} "
            "(--max_prompt_tokens, --context_length, the model's own limit); show fewer with "
            "--mcp_tool_names"
        )


def tokenizer_dir(name_or_path: str) -> Path:
    """Return the directory of the tokenizer; a local one needs no weights in it."""
    path = Path(name_or_path)
    return path if path.is_dir() else resolve_model(name_or_path)


def _context_length(model_dir: Path) -> int | None:
    """Return the longest sequence that the model takes by its own account, if it gives one.

    Servers refuse what is longer, and a generation that asks for more tokens than are left.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    # Models of several modalities keep their language part in a section of its own.
    text = values.get("text_config") or values
    length = text.get("max_position_embeddings")
    return length if isinstance(length, int) else None


class _NoScoring:
    """Stands in where a sampler class brings its own evaluation."""

    def check(self, scorer: str) -> None:
        raise ConfigError("no scorers were given to the scheduler; MCPSampler needs them")

    def extract_answer(self, text: str, schema: str) -> str | None:
        raise ConfigError("no scorers were given to the scheduler; MCPSampler needs them")

    async def score(self, task: MCPTask, answer: Any) -> Score:
        raise ConfigError("no scorers were given to the scheduler; MCPSampler needs them")
