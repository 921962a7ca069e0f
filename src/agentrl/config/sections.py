"""The sections of a run's configuration. Every field is a flat command-line flag of the same name.

A component receives its own section, never the whole. Field docstrings are the flags' help texts.
"""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator
from pydantic_core import PydanticCustomError

from agentrl.config.shipped_files import existing_or_shipped

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys forbidden, docstrings become help texts."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=True,
    )
    title: ClassVar[str] = ""


class RunSection(Section):
    """What the run is called and where its files go."""

    title: ClassVar[str] = "run"

    run_name: str = "run"
    """Name of the run: also of its database, output and log files."""
    output_dir: Path | None = None
    """Checkpoints, published weights, metrics and summary; `output/RUN_NAME` when not given."""
    logs_dir: Path = Path("logs/as")
    """Log files of all processes."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of a Prometheus endpoint (`/metrics`) of this process; none when not given. `agentrl run`
    gives the trainer this port and its samplers the ones that follow."""
    metrics_host: str = "127.0.0.1"
    """Address that the Prometheus endpoint listens on. It asks for no key."""
    seed: int = 42
    """Seed of everything that is drawn: order of questions, sampling, initial states."""
    fresh: bool = False
    """Start anew instead of resuming. Refused while the run's database or output still exists,
    unless `--delete_existing` is given too."""
    delete_existing: bool = False
    """With `--fresh`: delete the run's database and output directory first."""

    @field_validator("run_name")
    @classmethod
    def _check_run_name(cls, name: str) -> str:
        if not _RUN_NAME.fullmatch(name):
            # Databases, directories and files are called after it.
            raise PydanticCustomError(
                "run_name", "up to 63 letters, digits, - and _, the first a letter or digit"
            )
        return name

    @property
    def output_path(self) -> Path:
        """The output directory, absolute."""
        return (self.output_dir or Path("output") / self.run_name).absolute()


class ModelSection(Section):
    """The policy that is trained."""

    title: ClassVar[str] = "model"

    model_name_or_path: str = "assets/demo/model"
    """Directory of a Hugging Face checkpoint (weights, tokenizer, chat template), or a hub id."""
    model_name: str = "train-model"
    """Name under which servers serve the model."""
    trust_remote_code: bool = False
    """Run Python code that a checkpoint brings along. Only for checkpoints that you trust."""
    torch_dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Training precision; auto: bfloat16 on CUDA, float32 on CPU."""
    attention_implementation: Literal["sdpa", "flex", "varlen"] = "sdpa"
    """Attention back end of the trainer: SDPA along the paths of a tree; FlexAttention with a block
    mask (CUDA only); or variable-length flash attention with keys gathered along the paths (CUDA,
    bfloat16)."""
    router_replay: bool = False
    """Mixture-of-experts models: ask the servers which experts every token went to, store it with
    the turns, and let the trainer send the token to the same ones."""
    lora_rank: int = Field(default=0, ge=0)
    """Train a low-rank adapter (LoRA) of this rank on the frozen model; 0: train all weights. Servers
    get adapters, beside the model, and samples go on while they load (see docs/lora.md)."""
    lora_alpha: int = Field(default=32, ge=1)
    """The adapter's part is multiplied by lora_alpha / lora_rank."""
    lora_target_modules: tuple[str, ...] = (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    )
    """Linear layers that get an adapter, by the last part of their name. Experts of a mixture cannot
    have one: leave the last three out for a model that has nothing but experts there."""

    @field_validator("model_name_or_path")
    @classmethod
    def _find_shipped_model(cls, name: str) -> str:
        found = existing_or_shipped(Path(name))
        return str(found) if found.is_absolute() else name


PRIVATE_MONGO_ROOT = Path(".agentrl/mongo")
"""Folder of the private mongods' data, one folder a run in it."""


class StoreSection(Section):
    """The document store."""

    title: ClassVar[str] = "store"

    db_connection_string: SecretStr | None = None
    """MongoDB URI; `MONGODB_URI` when not given. Without either, `agentrl run` starts a private
    mongod. The database is always named after the run."""
    mongo_data_dir: Path | None = None
    """Where the private mongod keeps its data; `.agentrl/mongo/RUN_NAME` when not given."""
    mongo_port: int = 27417
    """Port of the private mongod (loopback); the next free one when it is taken."""


class DataSection(Section):
    """The questions."""

    title: ClassVar[str] = "data"

    train_file: Path | None = None
    """Training questions: a JSONL, JSON, CSV or Parquet file, a directory, or a data set of the
    Hugging Face hub (`owner/name`, `owner/name@config`, `:split` behind it; the last three need
    `agentrl-mongo[data]`). Without it, the tasks that the database holds."""
    eval_file: Path | None = None
    """Held-out questions, in any form that train_file takes."""
    records_of: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
    """`agentrl sft`: learn from the training records of this run instead of a train_file."""
    min_score: float = 0.5
    """`agentrl sft`: lowest score of a record that is learnt from."""
    num_train_epochs: int = Field(default=1, ge=1)
    """Times that every training question is asked."""
    num_generations: int = Field(default=8, ge=1)
    """Tries per training question: the size of a group."""
    eval_num_generations: int = Field(default=1, ge=1)
    """Tries per evaluation question."""
    default_scorer: str = "agentcpm"
    """Scorer of questions that name none."""
    default_answer_schema: str = "answer"
    """Answer schema of questions that name none: `boxed`, or a tag name."""
    system_prompt: str | None = None
    """System prompt of questions that bring none."""
    shuffle: bool = True
    """Ask the questions of each epoch in an order drawn with the seed."""

    @field_validator("train_file", "eval_file")
    @classmethod
    def _find_shipped_questions(cls, path: Path | None) -> Path | None:
        return None if path is None else existing_or_shipped(path)


class SamplingSection(Section):
    """How tokens are drawn."""

    title: ClassVar[str] = "sampling"

    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature of training rollouts."""
    eval_temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of evaluation rollouts; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus bound. Anything but 1 makes the behavior logprobs approximate."""
    top_k: int = -1
    """Keep the k likeliest tokens; -1 keeps all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Drop tokens below this share of the likeliest one."""
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty on tokens that appeared."""
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    """Penalty on tokens by how often they appeared."""
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    """Divisor on the scores of tokens that appeared."""
    max_new_tokens: int = Field(default=8196, ge=1)
    """Most tokens that one model call may sample."""
    max_prompt_tokens: int = Field(default=128_768, ge=1)
    """Longest prompt; a rollout whose context grows past it ends with `length_limit`."""
    preferred_sampling_params: dict[str, Any] | None = None
    """JSON object whose keys (temperature, top_p, top_k, min_p, *_penalty) override the above."""


class RolloutSection(Section):
    """How a rollout is played, and by how many samplers."""

    title: ClassVar[str] = "rollout"

    enable_sampling: bool = True
    """Start inference servers and samplers; otherwise train on what the database holds."""
    num_samplers: int = Field(default=2, ge=0)
    """Sampler processes that `agentrl run` starts."""
    max_concurrent_samples_per_process: int = Field(default=256, ge=1)
    """Rollouts that one sampler plays at the same time, at most. Those that only wait for their score
    do not count, but it holds at most twice as many altogether."""
    target_concurrency: int | None = Field(default=None, ge=1)
    """Rollouts that a sampler plays per inference server; when not given, as many as the servers
    say they have room for (memory for keys and values, queue)."""
    max_turns: int = Field(default=25, ge=1)
    """Model calls in a rollout, at most."""
    max_tool_calls: int = Field(default=200, ge=0)
    """Tool calls in a rollout, at most; those that cannot be read count too."""
    rollout_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Wall clock of one rollout; past it, it ends with `time_limit`."""
    repetition_early_stop_times: int = -1
    """End a rollout when the model gave the same reply this many times; <= 0: never."""
    enable_repetition_compress: bool = False
    """On repetition renew the context, repeated replies left out, instead of ending the rollout."""
    new_context: Literal["disabled", "discard_all_tools", "discard_all"] = "disabled"
    """What happens when the context is full. disabled: the rollout ends with length_limit;
    discard_all_tools: tool results (and the end of a long rest) are dropped; discard_all: only the
    question stays, with a summary where agent_config_path names a model for it (`browse_agent`)."""
    agent_config_path: Path | None = None
    """YAML file with the models of the LLM judge and the summarizer; see assets/agent_config.yml."""
    max_images: int = Field(default=8, ge=0)
    """Images of tool results that one rollout shows a model that sees; further ones are described."""
    max_image_megabytes: float = Field(default=10.0, gt=0)
    """Largest image that is fetched or taken from a tool."""
    image_networks: tuple[str, ...] = ()
    """Networks (10.0.0.0/8) that images are fetched from beside the public internet."""
    scorer_module: Path | None = None
    """Python file that registers scorers with MCPScorerFactory."""
    scoring: Literal["own", "elsewhere", "only"] = "own"
    """own: a sampler scores what it played, and what others left unscored; elsewhere: it leaves all
    scoring to the processes that were started with only, which play nothing."""
    lease_seconds: float = Field(default=30.0, gt=1)
    """How long a claim holds without a heartbeat; three heartbeats are sent in that time."""
    max_attempts: int = Field(default=5, ge=1)
    """Attempts at one slot before it is dead-lettered (status `failed`)."""
    drain_seconds: float = Field(default=0.0, ge=0)
    """On SIGTERM: time given to running rollouts before their slots are handed back."""
    resample_error_records: bool = True
    """Try a slot again after an infrastructure failure (up to max_attempts)."""
    exit_when_done: bool = False
    """End the sampler once no claimable or running slot is left."""


class ToolsSection(Section):
    """Where the tools are."""

    title: ClassVar[str] = "tools"

    mcp_manager_url: str | None = None
    """URL of one MCP server (streamable HTTP), or of an AgentDock aggregator (ends in `/mcpapi`)."""
    mcp_servers: str | None = None
    """`mcpServers` mapping as other MCP clients use it: a JSON file, or JSON itself."""
    mcp_server_name: str = "all"
    """Use only this server's tools (comma separated for several), or all."""
    mcp_tool_names: tuple[str, ...] = ()
    """Show only these tools (`tool` or `server.tool`); all when empty."""
    mcp_blocked_tools: tuple[str, ...] = ()
    """Never show these tools (`tool` or `server.tool`)."""
    mcp_auth_token: SecretStr | None = None
    """Bearer token for `mcp_manager_url`; `MCP_SERVER_TOKEN` when not given."""
    tool_timeout_seconds: float = Field(default=60.0, gt=0)
    """Longest wait for one tool call."""
    resumable_tools: bool = False
    """The tools keep no state between calls: a rollout whose sampler died is taken up by another at
    its last durable turn, instead of being played again. In `mcp_servers`, `"resumable": true` says
    the same of one server; it takes all of them."""
    tool_server_command: str | None = None
    """Command that `agentrl run` starts as the tool server; `{port}` is replaced by a free port and
    `mcp_manager_url` by the resulting address."""


class AgentSection(Section):
    """Somebody else's agent as the sampler."""

    title: ClassVar[str] = "agent"

    agent: str | None = None
    """Play every task with this function of (task, endpoint), which calls the model as it would
    call OpenAI's: `file.py:function`, `package.module:function`, or an entry point's name in the
    group `agentrl.agents`. Without it, AgentRL itself plays them with the tools."""
    agent_sampling: Literal["agent", "run"] = "agent"
    """Whose temperature, bounds, penalties and seed count where an agent's call gives any. A fixed
    seed or temperature 0 makes all tries of a question the same: then say run."""
    agent_routes: dict[str, dict[str, str]] | None = None
    """JSON object of other models that the agent may call: name -> base_url (OpenAI-compatible)
    and, if need be, model (its name there) and api_key_env (the environment variable that holds the
    key). Their calls are stored and not trained on."""
    agent_gateway_host: str = "127.0.0.1"
    """Address at which agents reach a sampler's gateway. Beyond loopback, every call needs the
    rollout's key."""


class InferenceSection(Section):
    """The inference servers."""

    title: ClassVar[str] = "inference"

    inference_backend: Literal["embedded", "sglang"] = "embedded"
    """embedded: the engine that ships here (CPU, small models); sglang: SGLang on GPUs."""
    inference_urls: tuple[str, ...] = ()
    """Running servers to use instead of starting any (comma separated)."""
    inference_gateway: str | None = None
    """Address of a gateway (such as sglang-router) before the servers of inference_urls: it chooses
    the server of every generation. New weights go to the servers themselves."""
    colocated: bool = False
    """Trainer and servers share one device and take turns: while the trainer computes, the servers
    give up the memory of weights and cache, and while they sample, it keeps its own in host memory
    (see docs/colocated.md)."""
    num_inference_servers: int = Field(default=1, ge=1)
    """Servers that `agentrl run` starts when no URLs are given."""
    inference_host: str = "127.0.0.1"
    """Address that servers listen on. Anything but loopback needs inference_api_key."""
    inference_port: int = 30000
    """Port of the first server; the next free one when it is taken."""
    inference_api_key: SecretStr | None = None
    """Bearer key of the data routes; `AGENTRL_API_KEY` when not given."""
    inference_admin_key: SecretStr | None = None
    """Bearer key of the control routes; `AGENTRL_ADMIN_KEY` when not given."""
    inf_tp_size: int = Field(default=1, ge=1)
    """Tensor parallel degree of one server."""
    inf_ep_size: int = Field(default=1, ge=1)
    """Expert parallel degree of one server."""
    inf_mem_ratio: float = Field(default=0.8, gt=0, le=1)
    """Share of GPU memory for SGLang's weights and cache."""
    max_running_requests: int = Field(default=64, ge=1)
    """Requests that one server decodes at the same time."""
    context_length: int | None = None
    """Longest sequence a server takes; the model's own limit when not given."""
    inference_request_log: Path | None = None
    """File to which the embedded engine writes every request's token ids, for comparing what was
    sent with what is stored."""
    server_hang_seconds: float = Field(default=30.0, gt=0)
    """A server that AgentRL started and that answers nothing for this long is killed and started
    again; after a third of it, it gets no more work."""
    inference_threads: int | None = None
    """CPU threads of the embedded engine."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls: auto (what the chat template shows), hermes, qwen, qwen25,
    qwen3_coder, glm45, llama3, mistral, kimi_k2, pythonic, deepseekv3, deepseekv31, minicpm,
    openai."""
    sglang_args: str = ""
    """Further arguments for `sglang.launch_server`, as typed in a shell."""


class AlgorithmSection(Section):
    """Advantages, losses, filters and freshness."""

    title: ClassVar[str] = "algorithm"

    loss_calculator: Literal["GRPO", "MINIRL", "GSPO", "CISPO", "REINFORCE"] = "GRPO"
    """Policy loss: GRPO, MINIRL, GSPO, CISPO or REINFORCE, in any case."""
    epsilon: float = Field(default=0.2, ge=0)
    """Half-width of the clip range."""
    epsilon_higher: float = Field(default=0.1, ge=0)
    """Extra width of the clip range upwards."""
    beta1: float | None = None
    """CE-GPPO weight of tokens clipped from below."""
    beta2: float | None = None
    """CE-GPPO weight of tokens clipped from above."""
    importance_weight_cap_ratio: float = Field(default=4.0, gt=0)
    """Factor on the clip range that gives the hard drop range."""
    strict_in_bound: bool = False
    """Make the hard drop range equal to the clip range."""
    out_of_date_decay: float | None = None
    """Narrow the hard drop range with staleness at this rate."""
    token_level_loss: bool = True
    """Average over all loss tokens of the step; otherwise over the records."""
    skip_length_normalization: bool = False
    """With token_level_loss false: sum over a record instead of averaging."""
    loss_normalizer_length: int | None = Field(default=None, ge=1)
    """With skip_length_normalization: divide by this constant length (Dr.GRPO)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with negative advantage (GRPO and GSPO)."""
    importance_weight_truncation: float | None = Field(default=None, gt=0)
    """Largest importance weight of MINIRL."""
    proximal: Literal["behavior", "recompute", "loglinear"] = "behavior"
    """Policy in the denominator of the clipped ratio: the sampler's, the trainer's at the start of
    the step, or one between the two by staleness (decoupled PPO)."""
    importance_correction: Literal["none", "full", "tis", "icepop", "mis"] = "none"
    """Weight of the proximal over the sampler's policy: none, as it is, truncated (TIS), or masked
    outside the bounds (IcePop; MIS). Needs another proximal than behavior."""
    correction_level: Literal["token", "sequence", "sequence_mean"] = "token"
    """What is weighed and masked: tokens, turns by their product, or by their geometric mean."""
    correction_lower: float = Field(default=0.5, ge=0)
    """Lower bound of icepop and mis."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of tis, icepop and mis."""
    veto_threshold: float | None = Field(default=None, gt=0)
    """Mask a turn in which the ratio of any token is below this."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty against a reference model; 0 loads none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL at a token."""
    reference_model: str | None = None
    """The reference of the KL penalty; model_name_or_path when not given."""
    advantage_estimator: Literal[
        "leave_one_out", "group_mean", "group_std", "reinforce_plus_plus"
    ] = "leave_one_out"
    """Baseline within the group; reinforce_plus_plus normalizes over the whole step, too."""
    adv_scaling: float = 1.0
    """Factor on the advantages."""
    sign_clip: bool = True
    """Keep advantages of wrong records (score <= 0.5) <= 0 and of right ones >= 0."""
    drop_zero_advantage: bool = True
    """Leave turns with advantage 0 out of the batch."""
    skip_non_positive_advantage: bool = False
    """Leave turns with advantage <= 0 out of the batch."""
    minimal_advantage: float | None = None
    """Leave turns with an advantage below this out of the batch."""
    min_score_spread: float = Field(default=0.1, ge=0)
    """Groups whose best and worst score differ by less teach nothing and are dropped."""
    balance_sample: bool = False
    """Keep about as many right as wrong records of a group."""
    min_turns: int = Field(default=1, ge=0)
    """Right records with fewer turns than this are not trained."""
    reserve_context_error_count: int = Field(default=-1, ge=-1)
    """Records a group that ended at a length or turn limit and are kept; -1 keeps all."""
    efficient_rewarding: bool = False
    """Shift scores by up to 0.1 in favour of right records with few turns."""
    max_staleness: int = Field(default=1, ge=0)
    """Oldest policy version, in steps behind the current one, that may still be trained on."""
    staleness_policy: Literal["drop", "wait"] = "drop"
    """drop: the groups that are complete are trained on, and records beyond max_staleness dropped;
    wait: groups are trained on in their order, and steps wait for the slowest, so that nothing gets
    too old."""
    max_trained_count: int = Field(default=1, ge=1)
    """Optimizer steps that may use a record."""
    retrained_interval: int = Field(default=1, ge=1)
    """Steps between two uses of a record, at least."""

    @field_validator("loss_calculator", mode="before")
    @classmethod
    def _canonical_loss(cls, name: object) -> str:
        kind = str(name).upper()
        if kind == "CROSSENTROPY":
            raise PydanticCustomError(
                "loss_calculator",
                "CrossEntropy is the loss of supervised fine-tuning: use `agentrl sft`",
            )
        return kind


class TrainerSection(Section):
    """The optimizer's loop."""

    title: ClassVar[str] = "trainer"

    max_steps: int = Field(default=1000, ge=1)
    """Optimizer steps in all (the resumed ones included)."""
    groups_per_step: int | None = None
    """Groups that one step consumes; when not given, per_device_train_batch_size *
    gradient_accumulation_steps records are taken, rounded up to whole groups."""
    per_device_train_batch_size: int = Field(default=1, ge=1)
    """Used when groups_per_step is not given."""
    gradient_accumulation_steps: int = Field(default=48, ge=1)
    """Used when groups_per_step is not given."""
    learning_rate: float = Field(default=1e-6, ge=0)
    """Peak learning rate of AdamW. 0 trains nothing (a control experiment)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    optim_args: str = "beta1=0.9,beta2=0.98"
    """AdamW's betas and eps: `beta1=..,beta2=..,eps=..`."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down."""
    max_tokens: int = Field(default=65536, ge=1)
    """Token budget of one forward pass. Trees with longer paths are computed in chunks."""
    merge: Literal["tree", "linear", "none"] = "tree"
    """Prefix sharing in the forward pass: over the whole group, within a record, or none."""
    verify_merge: int = Field(default=0, ge=0)
    """Every so many steps, compute the step without merging, too, and stop with a report when the
    gradients differ; 0: never."""
    loss_seq_chunk_size: int = Field(default=4096, ge=1)
    """Loss positions that go through the LM head at a time."""
    log_entropy: bool = True
    """Compute and log the policy's entropy."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory and copy a layer at a time to the
    GPU (FSDP2, several ranks). Without GPUs everything is there anyway."""
    dp_replicate_size: int = Field(default=1, ge=1)
    """Copies of the sharded model (HSDP); the ranks that the sizes leave shard it with FSDP2."""
    tp_size: int = Field(default=1, ge=1)
    """Ranks that split heads, hidden units and vocabulary (tensor and sequence parallel)."""
    ep_size: int = Field(default=1, ge=1)
    """Ranks that share out the experts of a mixture-of-experts model."""
    cp_size: int = Field(default=1, ge=1)
    """Ranks that share the tokens of every row (context parallel)."""
    num_processes: int = Field(default=1, ge=1)
    """Trainer ranks that `agentrl run` starts, over all machines; more than one go through
    `accelerate launch` with assets/fsdp2_dst.yml."""
    num_machines: int = Field(default=1, ge=1)
    """Machines on which the same `agentrl run` is started, each with its share of the ranks;
    `NUM_MACHINES` when not given (see docs/deploy.md)."""
    machine_rank: int = Field(default=0, ge=0)
    """Number of this machine; `MACHINE_RANK` when not given. Machine 0 starts everything, the others
    trainer ranks only."""
    main_process_ip: str | None = None
    """Address of machine 0 for the other machines; `MASTER_ADDR` when not given."""
    main_process_port: int = Field(default=29500, ge=1, le=65535)
    """Port at which the trainer's ranks find each other; `MASTER_PORT` when not given."""
    trainer_threads: int | None = None
    """CPU threads of the trainer."""
    save_steps: int = Field(default=3, ge=1)
    """Steps between two checkpoints."""
    save_total_limit: int = Field(default=2, ge=1)
    """Checkpoints that are kept."""
    async_save: bool = False
    """Write checkpoints beside training. A crash meanwhile goes back to the one before."""
    full_determinism: bool = False
    """Use only algorithms that give the same bits every time; some are slower."""
    save_only_model: bool = False
    """Leave optimizer state out of checkpoints (such a run cannot resume exactly)."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between two log lines."""
    report_to: tuple[str, ...] = ()
    """Where the figures of every step go besides the console and metrics.jsonl, which are always
    written: tensorboard, wandb, swanlab (comma separated; see docs/monitoring.md)."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """What one device does at best, in dense TFLOP/s, for the model FLOPs utilization (`mfu`); known
    for current data-center GPUs."""
    eval_strategy: Literal["no", "ends", "steps"] = "no"
    """no; ends: before the first and after the last step; steps: also every eval_steps, beside
    training, which goes on meanwhile (see docs/evaluation.md)."""
    eval_steps: int = Field(default=5, ge=1)
    """Steps between two evaluations."""
    eval_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Longest wait for an evaluation."""
    sync_sampling: bool = False
    """Sample, then train, in turn (max_staleness 0)."""
    trained_scorer: str | None = Field(default=None, pattern=r"^[^@]+(@[^@]+)?$")
    """Train on the scores of this scorer, NAME or NAME@VERSION; groups wait until all their records
    have one (`agentrl store rescore`). When not given: the scores that the samplers gave."""
    consumer: str = Field(default="trainer", pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Name under which this trainer keeps its ledger. `trainer` publishes weights and admits
    samples; a trainer of any other name reads the same records along with it, changes nothing but
    its own ledger, and needs an output_dir of its own."""
    trainer_lease_seconds: float = Field(default=60.0, gt=1)
    """How long the trainer's claim on the run holds without a heartbeat."""


class PublishSection(Section):
    """How new weights reach the servers."""

    title: ClassVar[str] = "publish"

    publish_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to generations in flight: recomputed under the new weights, continued on the
    old cache, or cut and resumed by the client."""
    publish_timeout_seconds: float = Field(default=120.0, gt=0)
    """Longest wait for one server; a slower one is taken out."""
    weight_sync: Literal["disk", "distributed"] = "disk"
    """How weights reach the servers: as files that all of them see, or broadcast from the trainer's
    memory over a process group (NCCL between GPUs, gloo otherwise); files are then written beside
    training, for servers that come later."""
    weight_sync_host: str = "127.0.0.1"
    """Address of this machine at which servers find the trainer for `--weight_sync distributed`."""
    weight_sync_bucket_mb: int = Field(default=256, ge=1)
    """Largest part that is broadcast at a time, in MiB."""
    keep_policies: int = Field(default=2, ge=1)
    """Published weight directories that are kept besides those in use."""


SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "model": ModelSection,
    "store": StoreSection,
    "data": DataSection,
    "sampling": SamplingSection,
    "rollout": RolloutSection,
    "tools": ToolsSection,
    "agents": AgentSection,
    "inference": InferenceSection,
    "algorithm": AlgorithmSection,
    "trainer": TrainerSection,
    "publish": PublishSection,
}


class RootConfig(BaseModel):
    """All sections together: what one process was started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    store: StoreSection = StoreSection()
    data: DataSection = DataSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    tools: ToolsSection = ToolsSection()
    agents: AgentSection = AgentSection()
    inference: InferenceSection = InferenceSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    publish: PublishSection = PublishSection()

    @property
    def private_mongo_dir(self) -> Path:
        """Where the run's private mongod keeps its data."""
        return self.store.mongo_data_dir or PRIVATE_MONGO_ROOT / self.run.run_name
