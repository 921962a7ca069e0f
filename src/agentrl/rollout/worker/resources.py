"""Opens the clients that all rollouts of a process share, as configured."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentrl.config.sections import (
    DataSection,
    InferenceSection,
    RootConfig,
    SamplingSection,
    ToolsSection,
)
from agentrl.datasets.entries import folder_of, read_entries
from agentrl.datasets.question import question_of
from agentrl.errors import ConfigError
from agentrl.inference import ServerPool
from agentrl.models.checkpoints.architectures import decoder_config, raw_config
from agentrl.models.checkpoints.resolve import resolve_tokenizer
from agentrl.renderers.renderer import Renderer
from agentrl.rewards import RegisteredScoring
from agentrl.rollout.context import RolloutContext, Scoring, Summarizer
from agentrl.rollout.evaluated_route import open_evaluated_route
from agentrl.store import TrajectoryStore
from agentrl.tools import ToolsConfig, ToolSpec, connect_tools, load_mcp_servers
from agentrl.tools.servers.served_question import NO_QUESTION, ServedQuestion
from agentrl.tools.tool_walls import tool_wall

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_context(
    config: RootConfig, scoring: Scoring | None = None, summarizer: Summarizer | None = None
) -> AsyncIterator[RolloutContext]:
    """Connect to the store and the tools, load the renderer, and open the pool of servers."""
    uri = config.store.db_connection_string
    if uri is None:
        raise ConfigError("a sampler needs --db_connection_string (or MONGODB_URI)")
    renderer, context_length = _open_renderer(config)
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            TrajectoryStore.connect(uri.get_secret_value(), config.run.run_name)
        )
        shows_images = renderer.shows_images_of("tool") and config.rollout.max_images > 0
        tools = tools_of(config).model_copy(
            update={
                "show_images": shows_images,
                "show_instructions": config.tools.mcp_instructions and renderer.traits.shows_system,
                "log_dir": config.run.logs_dir,
                "log_prefix": f"{config.run.run_name}_tools_",
            }
        )
        toolbox = await stack.enter_async_context(connect_tools(tools))
        check_tools(config.sampling, context_length, renderer, toolbox.specs)
        servers = await stack.enter_async_context(
            ServerPool(
                api_key=config.inference.inference_api_key,
                gateway=config.inference.inference_gateway,
            )
        )
        route = await stack.enter_async_context(open_evaluated_route(config.agents))
        yield RolloutContext(
            store=store,
            servers=servers,
            renderer=renderer,
            toolbox=toolbox,
            scoring=scoring or RegisteredScoring(),
            rollout=config.rollout,
            sampling=config.sampling,
            seed=config.run.seed,
            context_length=context_length,
            router_replay=config.model.router_replay,
            resumable=is_resumable(config, tools),
            has_trees=bool(config.data.rounds),
            summarizer=summarizer,
            evaluated_route=route,
            question_folders=question_folders(config.data),
        )


def question_folders(data: DataSection) -> dict[str, Path]:
    """Return the folders whose files the rows of a split may name."""
    files = {"train": data.train_file, "eval": data.eval_file}
    folders = {split: folder_of(file) for split, file in files.items() if file is not None}
    return {split: folder for split, folder in folders.items() if folder is not None}


def is_resumable(config: RootConfig, tools: ToolsConfig) -> bool:
    """Return whether another sampler may resume a dead one's rollout where it stopped.

    Not if contexts are rewritten: the summaries behind a rewrite are not stored, and new ones would
    lead to a different context than that of the recorded turns. Not if a user's agent or an
    environment runs the rollout either: its state is unknown.
    """
    agents = config.agents
    if agents.has_agent or agents.evaluated_route is not None or config.data.environments:
        return False
    rewrites = config.rollout.new_context != "disabled" or config.rollout.enable_repetition_compress
    return (config.tools.resumable_tools or tools.is_resumable) and not rewrites


def tools_of(config: RootConfig) -> ToolsConfig:
    """Return a run's tool servers, whose programs see only what the user opens to them."""
    tools = tools_config(config.tools)
    for name, server in tools.servers.items():
        if server.command is not None:
            opened = (*server.named_paths(), *map(Path, server.writable))
            tool_wall(config, opened, named_by=f"mcpServers.{name}")
    asks = any(server.asks_for_question for server in tools.servers.values())
    example = example_question(config.data) if asks else NO_QUESTION
    return tools.model_copy(update={"wall": tool_wall(config), "example": example})


def tools_to_start(config: RootConfig) -> ToolsConfig:
    """Return `tools_of` a run that is not there yet.

    The stored configuration of a run contains the address of its former server.
    """
    section = config.tools.model_copy(update={"tool_server_url": None})
    return tools_of(config.model_copy(update={"tools": section}))


def example_question(data: DataSection) -> ServedQuestion:
    """Return a question of the run, for servers that are started to list their tools."""
    for file in (data.train_file, data.eval_file):
        if file is not None:
            folder = folder_of(file)
            for where, entry in read_entries(file):
                question = question_of(entry, data, where, folder)
                return ServedQuestion(question.id, "", question.columns, folder)
    return NO_QUESTION


def tools_config(section: ToolsSection) -> ToolsConfig:
    """Return the tool servers that the flags name, possibly none."""
    servers = {}
    if section.mcp_servers is not None:
        servers.update(load_mcp_servers(section.mcp_servers.get_secret_value()))
    for url in (section.mcp_manager_url, section.tool_server_url):
        if url is not None:
            servers.update(load_mcp_servers(url.get_secret_value()))
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
    sampling: SamplingSection,
    context_length: int | None,
    renderer: Renderer,
    specs: Sequence[ToolSpec],
) -> None:
    """Check that the model's prompts can hold its tools and their results."""
    if not specs:
        return
    renderer.check_tools()
    if not renderer.traits.shows_tools:
        log.warning(
            "the model's chat template does not render tools; describing them in the system prompt"
        )
    tools = [spec.openai() for spec in specs]
    num_tokens = len(renderer.render([{"role": "user", "content": "x"}], tools))
    room = sampling.max_prompt_tokens
    if context_length is not None:
        room = min(room, context_length - 1)
    if num_tokens >= room:
        raise ConfigError(
            f"{len(specs)} tools take {num_tokens} tokens to describe, and a prompt may have "
            f"{room} (--max_prompt_tokens, --context_length, the model's own limit); select fewer "
            "with --mcp_tool_names"
        )


def check_shown_tools(config: RootConfig, specs: Sequence[ToolSpec]) -> None:
    """Check that the prompts of the configured model can hold these tools; see `check_tools`."""
    renderer, context_length = _open_renderer(config)
    check_tools(config.sampling, context_length, renderer, specs)


def _open_renderer(config: RootConfig) -> tuple[Renderer, int | None]:
    """Return the model's renderer, and the longest sequence that the servers accept."""
    model_dir = resolve_tokenizer(config.model.model_name_or_path)
    parser = config.inference.tool_call_parser
    renderer = Renderer.of_policy(config.model, model_dir, tool_call_parser=parser)
    return renderer, served_context_length(config.inference, model_dir)


def served_context_length(inference: InferenceSection, model_dir: Path) -> int | None:
    """Return the longest sequence that the servers accept, in tokens, if known.

    It comes from `--context_length`, else from the model's `config.json`. Servers refuse longer
    sequences, and generations that ask for more tokens than are left.
    """
    if inference.context_length:
        return inference.context_length
    if not (model_dir / "config.json").is_file():
        return None
    length = getattr(decoder_config(raw_config(model_dir)), "max_position_embeddings", None)
    return length if isinstance(length, int) else None
