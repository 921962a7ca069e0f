"""Sections of the sampling side: tokens, rollouts, tools, agents and inference servers."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr

from agentrl.config.gpu_lists import GpuList
from agentrl.config.own_function import BuiltInOr
from agentrl.config.secrets import SecretCommand, SecretRoutes, SecretServers, SecretUrl
from agentrl.config.sections.section import ConfigSection
from agentrl.config.value_kinds import ADDRESS, CODE, COMMAND, PLAIN, SECRET
from agentrl.schema.sampling_bounds import (
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Temperature,
    TokenPenalty,
    TopK,
    TopP,
)

BRANCH_RULES = ("random", "entropy", "value")
"""Built-in values of `--branch_rule`."""


class SamplingSection(ConfigSection):
    """How tokens are sampled."""

    temperature: Temperature = 1.0
    """Sampling temperature of training rollouts."""
    eval_temperature: Temperature = 0.0
    """Sampling temperature of evaluation rollouts; 0 is greedy."""
    top_p: TopP = 1.0
    """Nucleus sampling threshold. Any value but 1 makes the behavior logprobs approximate."""
    top_k: TopK = -1
    """Number of most likely tokens to sample from; -1 keeps all."""
    min_p: MinP = 0.0
    """Minimum probability of a token, relative to the most likely token."""
    presence_penalty: TokenPenalty = 0.0
    """Penalty on the logits of tokens that have already appeared."""
    frequency_penalty: TokenPenalty = 0.0
    """Penalty on the logits of tokens for each previous occurrence."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divisor of the logits of tokens that have already appeared; 1 has no effect."""
    max_new_tokens: MaxNewTokens = 8192
    """Maximum number of tokens sampled in one model call."""
    max_prompt_tokens: int = Field(default=128_768, ge=1)
    """Maximum prompt length in tokens; a rollout whose context exceeds it ends with
    `length_limit`."""
    preferred_sampling_params: Annotated[dict[str, Any] | None, PLAIN] = None
    """JSON object whose keys (temperature, top_p, top_k, min_p, *_penalty) override the flags
    above."""


class RolloutSection(ConfigSection):
    """How rollouts run, and in how many samplers."""

    enable_sampling: bool = True
    """Start inference servers and samplers; with false, train on the records in the database."""
    num_samplers: int = Field(default=2, ge=0, le=1000)
    """Sampler processes that `agentrl run` starts."""
    max_concurrent_samples_per_process: int = Field(default=256, ge=1, le=100_000)
    """Maximum number of concurrent rollouts per sampler. Rollouts that only wait for their score do
    not count, but a sampler holds at most twice this number in total. Environments that start a
    program per rollout (verifiers, harbor) run 4 per core by default, in all samplers together."""
    target_concurrency: int | None = Field(default=None, ge=1, le=100_000)
    """Concurrent rollouts of a sampler per inference server; by default limited by the capacity
    that the servers report (KV cache, queue)."""
    require_signal: bool = False
    """`agentrl run`: stop before the first step (exit status 3) if the first answers all score the
    same in their groups, so that nothing can be learned. By default, the run says so and goes on."""
    max_turns: int = Field(default=25, ge=1)
    """Maximum number of model calls in a rollout."""
    branch_rule: Annotated[str, BuiltInOr(BRANCH_RULES)] = "random"
    """Where rollouts of later rounds leave earlier ones (`--rollouts tree`). `random`: a root and a
    depth, drawn before either is looked at; `entropy`: where a turn's first tokens surprise most;
    `value`: where the scores below a turn leave its worth most uncertain."""
    branch_depth: int | None = Field(default=None, ge=1)
    """Deepest turn that `branch_rule` random draws; by default max_turns. A rollout that ended
    before it gives no branch but another rollout from the question."""
    max_tool_calls: int = Field(default=200, ge=0)
    """Maximum number of tool calls in a rollout, including malformed ones."""
    max_reminders: int | None = Field(default=None, ge=0)
    """Maximum number of reminders in a row that answer replies with neither a tool call nor an
    answer; after them, the rollout ends with `no_answer`. By default 2 with tools and 0 without."""
    rollout_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Maximum wall-clock time of a rollout in seconds; after it, the rollout ends with
    `time_limit`."""
    repetition_early_stop_times: int = -1
    """End a rollout after the same reply was repeated this many times; 0 or less: never."""
    enable_repetition_compress: bool = False
    """On repetition, rebuild the context without the repeated replies instead of ending the
    rollout."""
    new_context: Literal["disabled", "discard_all_tools", "discard_all"] = "disabled"
    """What happens when the context is full. `disabled`: the rollout ends with length_limit;
    `discard_all_tools`: tool results are dropped (and the end of the rest, if it is long);
    `discard_all`: only the question is kept, with a summary if agent_config_path names a model for
    it (`browse_agent`)."""
    agent_config_path: Path | None = None
    """YAML file with the models of the LLM judge and the summarizer; see
    assets/agent_config.yml."""
    max_images: int = Field(default=8, ge=0)
    """Maximum number of images from tool results that a vision model sees per rollout; further
    images are replaced by a description."""
    max_image_megabytes: float = Field(default=10.0, gt=0)
    """Maximum size in megabytes of an image that is fetched or accepted from a tool."""
    image_networks: Annotated[tuple[str, ...], ADDRESS] = ()
    """Private networks (10.0.0.0/8) from which images may be fetched, in addition to the public
    internet."""
    answer_instruction: Annotated[str, PLAIN] = Field(default="auto", min_length=1)
    """What is added to a question to say how the answer is written. `auto`: one sentence, where
    neither the question nor the system prompt tells the model of the answer schema; `none`: nothing;
    any other text is added to every question."""
    scorer_module: Annotated[Path | None, CODE] = None
    """Python file that registers scorers with MCPScorerFactory."""
    scorer_timeout_seconds: float = Field(default=300.0, gt=0)
    """Timeout for scoring one record in seconds; after it, the record has no score."""
    scoring: Literal["own", "elsewhere", "only"] = "own"
    """Which processes score. `own`: a sampler scores its own rollouts and those that others left
    unscored; `elsewhere`: it leaves scoring to processes started with `only`, which run no
    rollouts."""
    lease_seconds: float = Field(default=30.0, gt=1)
    """Seconds until a lease expires without a heartbeat; three heartbeats are sent in this time."""
    max_attempts: int = Field(default=5, ge=1)
    """Maximum number of attempts at one slot before it is dead-lettered (status `failed`)."""
    drain_seconds: float = Field(default=0.0, ge=0)
    """Grace period in seconds for running rollouts on SIGTERM, before their slots are released."""
    resample_error_records: bool = True
    """Retry a slot after an infrastructure failure, up to max_attempts attempts in total."""
    exit_when_done: bool = False
    """Exit the sampler once no claimable or running slot is left."""


class ToolsSection(ConfigSection):
    """Where the tools are."""

    mcp_manager_url: SecretUrl | None = None
    """URL of one MCP server (streamable HTTP), or of an AgentDock aggregator (ends in
    `/mcpapi`)."""
    mcp_servers: SecretServers | None = None
    """`mcpServers` mapping in the format of other MCP clients: a JSON file, or inline JSON."""
    mcp_server_name: Annotated[str, PLAIN] = "all"
    """Servers whose tools are used (comma separated), or all."""
    mcp_tool_names: Annotated[tuple[str, ...], PLAIN] = ()
    """Tools to offer to the model (`tool` or `server.tool`); all by default."""
    mcp_blocked_tools: Annotated[tuple[str, ...], PLAIN] = ()
    """Tools to hide from the model (`tool` or `server.tool`)."""
    mcp_instructions: bool = True
    """Append the usage instructions of MCP servers to the system prompt of a rollout."""
    mcp_auth_token: SecretStr | None = None
    """Bearer token for HTTP servers without an Authorization header; `MCP_SERVER_TOKEN` by
    default."""
    tool_timeout_seconds: float = Field(default=60.0, gt=0)
    """Timeout of one tool call in seconds."""
    tool_visible_paths: tuple[Path, ...] = ()
    """Files and folders that the programs of tools and agents may read in addition to those that
    their command lines name (comma separated; see docs/tools.md)."""
    tool_writable_paths: tuple[Path, ...] = ()
    """Files and folders that the programs of tools and agents may write to in addition to their
    scratch folders (comma separated; see docs/tools.md)."""
    allow_unconfined_tools: bool = False
    """Start the programs of tools and agents although this machine cannot confine them."""
    resumable_tools: bool = False
    """Declare that the tools keep no state between calls: when a sampler dies, another one resumes
    its rollouts at their last durable turn instead of restarting them. In `mcp_servers`,
    `"resumable": true` declares it for one server; a rollout is resumed only if all of its servers
    are resumable."""
    tool_server_command: SecretCommand | None = None
    """Command that `agentrl run` starts as the tool server; `{port}` is replaced with a free
    port."""
    tool_server_url: SecretUrl | None = None
    """Address of the server that `tool_server_command` started; set by the process that started
    it."""
    tool_server_env: Annotated[tuple[str, ...], SECRET] = ()
    """Environment variables that are passed to the tool server in addition to PATH, HOME, the
    locale and the certificates (comma separated)."""


class AgentSection(ConfigSection):
    """Agents of other frameworks."""

    agent: Annotated[str | None, CODE] = Field(default=None, min_length=1)
    """Function (task, endpoint) that runs every task and calls the model through an
    OpenAI-compatible API: `file.py:function`, `package.module:function`, or the name of an entry
    point in the group `agentrl.agents`. By default AgentRL itself runs the tasks with the tools."""
    agent_python: Annotated[Path | None, COMMAND] = None
    """Python in which the agent runs, with its framework and AgentRL (`scripts/setup_agents`); by
    default the sampler's own. The agent may then also be an AWorld agent."""
    agent_command: SecretCommand | None = None
    """Program that runs every task in its own process, such as `my-agent --task {query}`: it calls
    the model at OPENAI_BASE_URL or ANTHROPIC_BASE_URL with their keys, and prints the answer or
    writes it to `{answer_file}`. Also replaced: `{model}`, `{task_id}`, `{base_url}`,
    `{anthropic_base_url}`."""
    agent_env: Annotated[tuple[str, ...], SECRET] = ()
    """Environment variables that are passed to the program in addition to PATH, the locale and the
    model's address (comma separated)."""
    agent_sampling: Literal["agent", "run"] = "agent"
    """Whose temperature, top_p and similar parameters, penalties and seed apply if an agent's call
    sets its own. With a fixed seed or temperature 0, all rollouts of a question are identical; use
    `run` for such an agent."""
    agent_routes: SecretRoutes | None = None
    """JSON object of other models that the agent may call: name -> base_url (OpenAI-compatible) and
    optionally model (its name there) and api_key_env (the environment variable with the key). These
    calls are stored but not trained on."""
    evaluated_route: Annotated[str | None, PLAIN] = Field(default=None, min_length=1)
    """Model of agent_routes that `agentrl eval` scores instead of the policy, by its chat API; no
    inference server is started."""
    agent_gateway_host: Annotated[str, ADDRESS] = "127.0.0.1"
    """Address at which agents reach a sampler's endpoint. With any address but loopback, every call
    needs the rollout's key."""

    @property
    def has_agent(self) -> bool:
        """Whether the user's agent runs the tasks, instead of AgentRL itself."""
        return self.agent is not None or self.agent_command is not None


class InferenceSection(ConfigSection):
    """The inference servers."""

    inference_backend: Annotated[str, CODE] = "embedded"
    """`embedded`: the engine that ships with AgentRL (small models; on the CPU, or on GPUs that
    `inference_gpus`, `share_gpus` or `colocated` give it); `sglang`: SGLang on GPUs; or a server that a
    plugin adds."""
    inference_urls: Annotated[tuple[str, ...], ADDRESS] = ()
    """Running servers to use instead of starting any (comma separated)."""
    inference_gateway: Annotated[str | None, ADDRESS] = None
    """Address of a gateway (such as sglang-router) in front of inference_urls: it chooses the
    server of every generation. New weights are sent directly to the servers."""
    colocated: bool = False
    """Trainer and servers share GPUs and take turns: while the trainer computes, the servers
    release the memory of weights and cache; while they sample, the trainer keeps its state in host
    memory (see docs/colocated.md)."""
    share_gpus: bool = False
    """Trainer and servers share GPUs and work concurrently: both keep their memory, and the servers get
    what the trainer's step leaves (see docs/colocated.md). With SGLang on a single GPU, `agentrl run`
    chooses between this and colocated."""
    num_inference_servers: int = Field(default=1, ge=1, le=1000)
    """Servers that `agentrl run` starts when inference_urls is empty; with SGLang, by default as
    many as fit on the GPUs that the trainer does not use."""
    inference_gpus: GpuList = ()
    """GPUs of this machine for the servers that `agentrl run` starts (`4-7`), inf_tp_size per
    server; by default all that the trainer does not use, or with colocated or
    share_gpus the trainer's."""
    inference_host: Annotated[str, ADDRESS] = "127.0.0.1"
    """Address that servers listen on. Any address but loopback requires inference_api_key."""
    inference_port: int = Field(default=30000, ge=0, le=65535)
    """Port of the first server; if it is in use, the next free one."""
    inference_api_key: SecretStr | None = None
    """Bearer key of the data routes; `AGENTRL_API_KEY` by default."""
    inference_admin_key: SecretStr | None = None
    """Bearer key of the control routes; `AGENTRL_ADMIN_KEY` by default."""
    inf_tp_size: int = Field(default=1, ge=1, le=1024)
    """Tensor parallel degree of one server."""
    inf_ep_size: int = Field(default=1, ge=1, le=1024)
    """Expert parallel degree of one server."""
    inf_mem_ratio: float = Field(default=0.8, gt=0, le=1)
    """Fraction of GPU memory for SGLang's weights and cache; with share_gpus, by default what the
    trainer's step leaves."""
    max_running_requests: int = Field(default=64, ge=1, le=100_000)
    """Maximum number of requests that one server decodes at the same time."""
    context_length: int | None = Field(default=None, ge=1)
    """Maximum sequence length in tokens that a server accepts; the model's own limit by default."""
    inference_request_log: Path | None = None
    """File to which the embedded engine writes the token ids of every request, for comparison with
    the stored ones."""
    server_hang_seconds: float = Field(default=30.0, gt=0)
    """Seconds without a response after which a server that AgentRL started is killed and restarted;
    after a third of this time it receives no more requests."""
    weight_roots: tuple[Path, ...] = ()
    """Directories whose contents the embedded engine may load as new weights, in addition to the
    run's output directory and the model's own."""
    inference_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of the embedded engine; torch's choice by default."""
    tool_call_parser: Annotated[str, PLAIN] = "auto"
    """Format of the model's tool calls: auto (detected from the chat template), hermes, qwen,
    qwen25, qwen3_coder, glm45, llama3, mistral, kimi_k2, pythonic, lfm2, gemma4, minimax_m2,
    minicpm, deepseekv3, deepseekv31, deepseekv32, deepseekv4, harmony, gpt-oss, openai (see
    docs/tools.md)."""
    sglang_args: Annotated[str, COMMAND] = ""
    """Additional arguments for `sglang.launch_server`, in shell syntax."""

    @property
    def is_on_trainer_gpus(self) -> bool:
        """Whether the servers stand on the trainer's GPUs, in turns or concurrently."""
        return self.colocated or self.share_gpus

    @property
    def sharing_flag(self) -> str:
        """The flag that puts the servers on the trainer's GPUs."""
        return "--share_gpus" if self.share_gpus else "--colocated"
