"""Sections of the sampling side: tokens, rollouts, tools, agents and inference servers."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr

from agentrl.config.gpu_lists import GpuList
from agentrl.config.secret_types import SecretCommand, SecretRoutes, SecretServers, SecretUrl
from agentrl.config.sections.section import ConfigSection


class SamplingSection(ConfigSection):
    """How tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature of training rollouts."""
    eval_temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of evaluation rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus bound. Any value but 1 makes the behavior logprobs approximate."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of likeliest tokens that are kept; -1 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Smallest probability that a token may have, as a share of the likeliest token's."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty on the logits of tokens that have appeared."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty on the logits of tokens for each time that they have appeared."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    """Divisor on the logits of tokens that have appeared; 1 changes nothing."""
    max_new_tokens: int = Field(default=8192, ge=1)
    """Most tokens that one model call may sample."""
    max_prompt_tokens: int = Field(default=128_768, ge=1)
    """Longest prompt in tokens; a rollout whose context exceeds it ends with `length_limit`."""
    preferred_sampling_params: dict[str, Any] | None = None
    """JSON object whose keys (temperature, top_p, top_k, min_p, *_penalty) override the flags
    above."""


class RolloutSection(ConfigSection):
    """How rollouts run, and in how many samplers."""

    enable_sampling: bool = True
    """Start inference servers and samplers; with false, train on what the database holds."""
    num_samplers: int = Field(default=2, ge=0, le=1000)
    """Sampler processes that `agentrl run` starts."""
    max_concurrent_samples_per_process: int = Field(default=256, ge=1)
    """Most rollouts that one sampler runs at the same time. Rollouts that only wait for their score
    do not count, but a sampler holds at most twice as many altogether."""
    target_concurrency: int | None = Field(default=None, ge=1)
    """Rollouts that a sampler runs for each inference server; by default as many as the servers
    report room for (key and value memory, queue)."""
    max_turns: int = Field(default=25, ge=1)
    """Most model calls in a rollout."""
    max_tool_calls: int = Field(default=200, ge=0)
    """Most tool calls in a rollout, malformed ones included."""
    rollout_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Longest wall-clock time of a rollout in seconds; past it, the rollout ends with
    `time_limit`."""
    repetition_early_stop_times: int = -1
    """End a rollout when the model gave the same reply this many times; 0 or less: never."""
    enable_repetition_compress: bool = False
    """On repetition, renew the context without the repeated replies instead of ending the
    rollout."""
    new_context: Literal["disabled", "discard_all_tools", "discard_all"] = "disabled"
    """What happens when the context is full. `disabled`: the rollout ends with length_limit;
    `discard_all_tools`: tool results (and the end of a long rest) are dropped; `discard_all`: only
    the question stays, with a summary where agent_config_path names a model for it
    (`browse_agent`)."""
    agent_config_path: Path | None = None
    """YAML file with the models of the LLM judge and the summarizer; see
    assets/agent_config.yml."""
    max_images: int = Field(default=8, ge=0)
    """Most images of tool results that one rollout shows to a vision model; further ones are
    described."""
    max_image_megabytes: float = Field(default=10.0, gt=0)
    """Size in megabytes of the largest image that is fetched or taken from a tool."""
    image_networks: tuple[str, ...] = ()
    """Networks (10.0.0.0/8) from which images are fetched besides the public internet."""
    scorer_module: Path | None = None
    """Python file that registers scorers with MCPScorerFactory."""
    scorer_timeout_seconds: float = Field(default=300.0, gt=0)
    """Longest time of one scoring in seconds; past it, the record has no score."""
    scoring: Literal["own", "elsewhere", "only"] = "own"
    """Who scores. `own`: a sampler scores its own rollouts and those that others left unscored;
    `elsewhere`: it leaves all scoring to processes started with `only`, which run no rollouts."""
    lease_seconds: float = Field(default=30.0, gt=1)
    """Seconds that a claim holds without a heartbeat; three heartbeats are sent in that time."""
    max_attempts: int = Field(default=5, ge=1)
    """Attempts at one slot before it is dead-lettered (status `failed`)."""
    drain_seconds: float = Field(default=0.0, ge=0)
    """Seconds that running rollouts get to finish on SIGTERM before their slots are released."""
    resample_error_records: bool = True
    """Try a slot again after an infrastructure failure, up to max_attempts times."""
    exit_when_done: bool = False
    """End the sampler once no claimable or running slot is left."""


class ToolsSection(ConfigSection):
    """Where the tools are."""

    mcp_manager_url: SecretUrl | None = None
    """URL of one MCP server (streamable HTTP), or of an AgentDock aggregator (ends in
    `/mcpapi`)."""
    mcp_servers: SecretServers | None = None
    """`mcpServers` mapping in the form of other MCP clients: a JSON file, or JSON itself."""
    mcp_server_name: str = "all"
    """Server whose tools are used (comma separated for several), or all."""
    mcp_tool_names: tuple[str, ...] = ()
    """Tools to show (`tool` or `server.tool`); all by default."""
    mcp_blocked_tools: tuple[str, ...] = ()
    """Tools never to show (`tool` or `server.tool`)."""
    mcp_instructions: bool = True
    """Put what MCP servers say about their use behind the system prompt of a rollout."""
    mcp_auth_token: SecretStr | None = None
    """Bearer token for `mcp_manager_url`; `MCP_SERVER_TOKEN` by default."""
    tool_timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one tool call in seconds."""
    resumable_tools: bool = False
    """The tools keep no state between calls: when a sampler dies, another one resumes its rollouts
    at their last durable turn instead of starting them over. In `mcp_servers`, `"resumable": true`
    says the same of one server; a rollout is resumed only if all of its servers say so."""
    tool_server_command: SecretCommand | None = None
    """Command that `agentrl run` starts as the tool server; `{port}` is replaced by a free port."""
    tool_server_url: SecretUrl | None = None
    """Address of the server of `tool_server_command`; written down by what started it."""
    tool_server_env: tuple[str, ...] = ()
    """Environment variables that the tool server gets beside PATH, HOME, the locale and the
    certificates (comma separated)."""


class AgentSection(ConfigSection):
    """An agent of another framework as the sampler."""

    agent: str | None = Field(default=None, min_length=1)
    """Function of (task, endpoint) that runs every task and calls the model as it would call
    OpenAI's: `file.py:function`, `package.module:function`, or an entry point's name in the group
    `agentrl.agents`. By default AgentRL itself runs the tasks with the tools."""
    agent_python: Path | None = None
    """Python in which the agent runs, with its framework and AgentRL (`scripts/setup_agents`); by
    default the sampler's own. The agent may then be one of AWorld's, too."""
    agent_command: SecretCommand | None = None
    """Program that runs every task in a process of its own, such as `my-agent --task {query}`: it
    finds the model in OPENAI_BASE_URL or ANTHROPIC_BASE_URL and their keys, and prints the answer,
    or writes it into `{answer_file}`. Also replaced: `{model}`, `{task_id}`, `{base_url}`,
    `{anthropic_base_url}`."""
    agent_env: tuple[str, ...] = ()
    """Environment variables that the program gets beside PATH, its locale and the model's address
    (comma separated)."""
    agent_sampling: Literal["agent", "run"] = "agent"
    """Whose temperature, bounds, penalties and seed count when an agent's call gives any: the
    agent's or the run's. A fixed seed or temperature 0 makes all tries of a question the same; use
    `run` then."""
    agent_routes: SecretRoutes | None = None
    """JSON object of other models that the agent may call: name -> base_url (OpenAI-compatible) and
    optionally model (its name there) and api_key_env (the environment variable that holds the key).
    These calls are stored and not trained on."""
    agent_gateway_host: str = "127.0.0.1"
    """Address at which agents reach a sampler's endpoint. Beyond loopback, every call needs the
    rollout's key."""

    @property
    def has_agent(self) -> bool:
        """Whether an agent of the user's plays, and not AgentRL itself."""
        return self.agent is not None or self.agent_command is not None


class InferenceSection(ConfigSection):
    """The inference servers."""

    inference_backend: Literal["embedded", "sglang"] = "embedded"
    """`embedded`: the engine that ships with AgentRL (CPU, small models); `sglang`: SGLang on
    GPUs."""
    inference_urls: tuple[str, ...] = ()
    """Running servers to use instead of starting any (comma separated)."""
    inference_gateway: str | None = None
    """Address of a gateway (such as sglang-router) in front of inference_urls: it chooses the
    server of every generation. New weights go to the servers themselves."""
    colocated: bool = False
    """Trainer and servers share one device and take turns: while the trainer computes, the servers
    release the memory of weights and cache; while they sample, the trainer keeps its state in host
    memory (see docs/colocated.md)."""
    num_inference_servers: int = Field(default=1, ge=1, le=1000)
    """Servers that `agentrl run` starts when inference_urls is empty; with SGLang, by default as many
    as the GPUs are for that the trainer leaves."""
    inference_gpus: GpuList = ()
    """GPUs of this machine for the servers that `agentrl run` starts (`4-7`), inf_tp_size of them
    for each; by default all that the trainer leaves, or with colocated the trainer's."""
    inference_host: str = "127.0.0.1"
    """Address that servers listen on. Any address but loopback needs inference_api_key."""
    inference_port: int = Field(default=30000, ge=0, le=65535)
    """Port of the first server; the next free one when it is taken."""
    inference_api_key: SecretStr | None = None
    """Bearer key of the data routes; `AGENTRL_API_KEY` by default."""
    inference_admin_key: SecretStr | None = None
    """Bearer key of the control routes; `AGENTRL_ADMIN_KEY` by default."""
    inf_tp_size: int = Field(default=1, ge=1)
    """Tensor parallel degree of one server."""
    inf_ep_size: int = Field(default=1, ge=1)
    """Expert parallel degree of one server."""
    inf_mem_ratio: float = Field(default=0.8, gt=0, le=1)
    """Share of GPU memory for SGLang's weights and cache."""
    max_running_requests: int = Field(default=64, ge=1)
    """Most requests that one server decodes at the same time."""
    context_length: int | None = Field(default=None, ge=1)
    """Longest sequence in tokens that a server accepts; the model's own limit by default."""
    inference_request_log: Path | None = None
    """File to which the embedded engine writes every request's token ids, to compare what was sent
    with what is stored."""
    server_hang_seconds: float = Field(default=30.0, gt=0)
    """Seconds without any answer after which a server that AgentRL started is killed and restarted;
    after a third of them it gets no more work."""
    weight_roots: tuple[Path, ...] = ()
    """Directories from below which the embedded engine loads new weights, besides the run's output
    directory and the model's own."""
    inference_threads: int | None = Field(default=None, ge=1)
    """CPU threads of the embedded engine; torch's choice by default."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: auto (what the chat template shows), hermes, qwen, qwen25,
    qwen3_coder, glm45, llama3, mistral, kimi_k2, pythonic, deepseekv3, deepseekv31, minicpm,
    openai."""
    sglang_args: str = ""
    """Further arguments for `sglang.launch_server`, as typed in a shell."""
