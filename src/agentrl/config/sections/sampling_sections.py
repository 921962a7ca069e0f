"""Sections of the sampling side: tokens, rollouts, tools, agents and inference servers."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from agentrl.config.gpu_lists import GpuList
from agentrl.config.own_function import BuiltInOr
from agentrl.config.secrets import SecretCommand, SecretRoute, SecretServers, SecretUrl
from agentrl.config.sections.tuning import (
    AgentTuning,
    InferenceTuning,
    RolloutTuning,
    SamplingTuning,
    ToolsTuning,
)
from agentrl.config.value_kinds import ADDRESS, CODE, COMMAND, PLAIN, SECRET
from agentrl.schema.sampling_bounds import (
    MaxNewTokens,
    Temperature,
)

BRANCH_RULES = ("random", "entropy", "value")
"""Built-in values of `--branch_rule`."""


class SamplingSection(SamplingTuning):
    """How tokens are sampled."""

    temperature: Temperature = 1.0
    """Sampling temperature of training rollouts."""
    eval_temperature: Temperature = 0.0
    """Sampling temperature of evaluation rollouts; 0 is greedy."""
    max_new_tokens: MaxNewTokens = 8192
    """Maximum number of tokens sampled in one model call."""
    max_prompt_tokens: int = Field(default=128_768, ge=1)
    """Maximum prompt length in tokens; a rollout whose context exceeds it ends with
    `length_limit`."""


class RolloutSection(RolloutTuning):
    """How rollouts run, and in how many samplers."""

    num_samplers: int = Field(default=2, ge=0, le=1000)
    """Sampler processes that `agentrl run` starts."""
    max_concurrent_samples_per_process: int = Field(default=256, ge=1, le=100_000)
    """Maximum number of concurrent rollouts per sampler. Rollouts that only wait for their score do
    not count, but a sampler holds at most twice this number in total. Environments that start a
    program per rollout (verifiers, harbor) run 4 per core by default, in all samplers together."""
    require_signal: bool = False
    """`agentrl run`: stop before the first step (exit status 3) if the first answers all score the
    same in their groups, so that nothing can be learned. By default, the run says so and goes on."""
    max_turns: int = Field(default=25, ge=1)
    """Maximum number of model calls in a rollout."""
    branch_rule: Annotated[str, BuiltInOr(BRANCH_RULES)] = "random"
    """Where rollouts of later rounds leave earlier ones (`--rollouts tree`). `random`: a root and a
    depth, drawn before either is looked at; `entropy`: where a turn's first tokens surprise most;
    `value`: where the scores below a turn leave its worth most uncertain."""
    rollout_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Maximum wall-clock time of a rollout in seconds; after it, the rollout ends with
    `time_limit`."""
    agent_config_path: Path | None = None
    """YAML file with the models of the LLM judge and the summarizer; see
    assets/agent_config.yml."""
    answer_instruction: Annotated[str, PLAIN] = Field(default="auto", min_length=1)
    """What is added to a question to say how the answer is written. `auto`: one sentence, where
    neither the question nor the system prompt tells the model of the answer schema; `none`: nothing;
    any other text is added to every question."""
    scorer_module: Annotated[Path | None, CODE] = None
    """Python file that registers scorers with MCPScorerFactory."""
    exit_when_done: bool = False
    """Exit the sampler once no claimable or running slot is left."""


class ToolsSection(ToolsTuning):
    """Where the tools are."""

    mcp_manager_url: SecretUrl | None = None
    """URL of one MCP server (streamable HTTP), or of an AgentDock aggregator (ends in
    `/mcpapi`)."""
    mcp_servers: SecretServers | None = None
    """`mcpServers` mapping in the format of other MCP clients: a JSON file, or inline JSON."""
    mcp_tool_names: Annotated[tuple[str, ...], PLAIN] = ()
    """Tools to offer to the model (`tool` or `server.tool`); all by default."""
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
    tool_server_env: Annotated[tuple[str, ...], SECRET] = ()
    """Environment variables that are passed to the tool server in addition to PATH, HOME, the
    locale and the certificates (comma separated)."""


class AgentSection(AgentTuning):
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
    evaluated_route: SecretRoute | None = None
    """Model that `agentrl eval` scores instead of the policy, by its chat API; no inference server
    is started. JSON object of base_url (OpenAI-compatible, with its /v1), model (its name there)
    and optionally api_key_env (the environment variable with the key)."""

    @property
    def has_agent(self) -> bool:
        """Whether the user's agent runs the tasks, instead of AgentRL itself."""
        return self.agent is not None or self.agent_command is not None


class InferenceSection(InferenceTuning):
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
    inf_tp_size: int = Field(default=1, ge=1, le=1024)
    """Tensor parallel degree of one server."""
    inf_mem_ratio: float = Field(default=0.8, gt=0, le=1)
    """Fraction of GPU memory for SGLang's weights and cache; with share_gpus, by default what the
    trainer's step leaves."""
    context_length: int | None = Field(default=None, ge=1)
    """Maximum sequence length in tokens that a server accepts; the model's own limit by default."""
    inference_threads: int | None = Field(default=None, ge=1, le=4096)
    """CPU threads of the embedded engine; torch's choice by default."""
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
