"""Settings that runs rarely change: no flag sets them, but a file may, under `advanced:`.

Each class is the base of the section that its readers know. The fields that the original AgentRL has as
flags are accepted as flags, too (`config.flags.ORIGINAL`).
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SecretStr

from agentrl.config.secrets import SecretUrl
from agentrl.config.sections.section import ConfigSection
from agentrl.config.value_kinds import ADDRESS, PLAIN
from agentrl.schema.formulas import CorrectionLevel, KLEstimator
from agentrl.schema.sampling_bounds import MinP, RepetitionPenalty, TokenPenalty, TopK, TopP


class RunTuning(ConfigSection):
    """How a run is watched."""

    metrics_host: Annotated[str, ADDRESS] = "127.0.0.1"
    """Address that the Prometheus endpoint listens on."""
    metrics_key: SecretStr | None = None
    """Key that scrapers send (`Authorization: Bearer`); `AGENTRL_METRICS_KEY` by default, else a key
    that the run makes, in `metrics-key` of its output directory."""


class ModelTuning(ConfigSection):
    """How the model is served and computed."""

    model_name: Annotated[str, PLAIN] = "train-model"
    """Name under which servers serve the model."""
    attention_implementation: Literal["auto", "sdpa", "flex", "varlen"] = "auto"
    """Attention back end of the trainer. `auto`: the fastest on the device for each row; `sdpa`:
    SDPA along the paths of a tree; `flex`: FlexAttention with a block mask (CUDA only); `varlen`: variable-length flash attention with keys
    gathered along the paths (CUDA, bfloat16)."""


class DataTuning(ConfigSection):
    """How questions are read, and how trees grow."""

    tree_roots: int | None = Field(default=None, ge=1)
    """Rollouts of a tree that start at the question; by default half of num_generations."""
    tree_branches: int | None = Field(default=None, ge=1)
    """Rollouts of each later round of a tree, which start once the rounds before have ended; by
    default all others in one round."""
    row_format: Literal["auto", "plain"] = "auto"
    """`auto`: rows of known data sets that name no scorer are read by their columns (see
    docs/datasets.md); `plain`: fields are taken as they are."""
    shuffle: bool = True
    """Shuffle the questions of each epoch with the seed."""


class SamplingTuning(ConfigSection):
    """Further settings of sampling."""

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
    preferred_sampling_params: Annotated[dict[str, Any] | None, PLAIN] = None
    """JSON object whose keys (temperature, top_p, top_k, min_p, *_penalty) override the other
    flags of sampling."""


class RolloutTuning(ConfigSection):
    """Limits and retries of rollouts and scoring."""

    enable_sampling: bool = True
    """Start inference servers and samplers; with false, train on the records in the database."""
    target_concurrency: int | None = Field(default=None, ge=1, le=100_000)
    """Concurrent rollouts of a sampler per inference server; by default limited by the capacity
    that the servers report (KV cache, queue)."""
    branch_depth: int | None = Field(default=None, ge=1)
    """Deepest turn that `branch_rule` random draws; by default max_turns. A rollout that ended
    before it gives no branch but another rollout from the question."""
    max_tool_calls: int = Field(default=200, ge=0)
    """Maximum number of tool calls in a rollout, including malformed ones."""
    max_reminders: int | None = Field(default=None, ge=0)
    """Maximum number of reminders in a row that answer replies with neither a tool call nor an
    answer; after them, the rollout ends with `no_answer`. By default 2 with tools and 0 without."""
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
    max_images: int = Field(default=8, ge=0)
    """Maximum number of images from tool results that a vision model sees per rollout; further
    images are replaced by a description."""
    max_image_megabytes: float = Field(default=10.0, gt=0)
    """Maximum size in megabytes of an image that is fetched or accepted from a tool."""
    image_networks: Annotated[tuple[str, ...], ADDRESS] = ()
    """Private networks (10.0.0.0/8) from which images may be fetched, in addition to the public
    internet."""
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


class ToolsTuning(ConfigSection):
    """How tools are offered and called."""

    mcp_server_name: Annotated[str, PLAIN] = "all"
    """Servers whose tools are used (comma separated), or all."""
    mcp_blocked_tools: Annotated[tuple[str, ...], PLAIN] = ()
    """Tools to hide from the model (`tool` or `server.tool`)."""
    mcp_instructions: bool = True
    """Append the usage instructions of MCP servers to the system prompt of a rollout."""
    mcp_auth_token: SecretStr | None = None
    """Bearer token for HTTP servers without an Authorization header; `MCP_SERVER_TOKEN` by
    default."""
    tool_timeout_seconds: float = Field(default=60.0, gt=0)
    """Timeout of one tool call in seconds."""
    tool_server_url: SecretUrl | None = None
    """Address of the server that `tool_server_command` started; set by the process that started
    it."""


class AgentTuning(ConfigSection):
    """How an agent's calls are read, and where it finds the model."""

    agent_sampling: Literal["agent", "run"] = "agent"
    """Whose temperature, top_p and similar parameters, penalties and seed apply if an agent's call
    sets its own. With a fixed seed or temperature 0, all rollouts of a question are identical; use
    `run` for such an agent."""
    agent_gateway_host: Annotated[str, ADDRESS] = "127.0.0.1"
    """Address at which agents reach a sampler's endpoint. With any address but loopback, every call
    needs the rollout's key."""


class InferenceTuning(ConfigSection):
    """Keys, limits and supervision of the servers."""

    inference_api_key: SecretStr | None = None
    """Bearer key of the data routes; `AGENTRL_API_KEY` by default."""
    inference_admin_key: SecretStr | None = None
    """Bearer key of the control routes; `AGENTRL_ADMIN_KEY` by default."""
    inf_ep_size: int = Field(default=1, ge=1, le=1024)
    """Expert parallel degree of one server."""
    max_running_requests: int = Field(default=64, ge=1, le=100_000)
    """Maximum number of requests that one server decodes at the same time."""
    inference_request_log: Path | None = None
    """File to which the embedded engine writes the token ids of every request, for comparison with
    the stored ones."""
    server_hang_seconds: float = Field(default=30.0, gt=0)
    """Seconds without a response after which a server that AgentRL started is killed and restarted;
    after a third of this time it receives no more requests."""
    weight_roots: tuple[Path, ...] = ()
    """Directories whose contents the embedded engine may load as new weights, in addition to the
    run's output directory and the model's own."""
    tool_call_parser: Annotated[str, PLAIN] = "auto"
    """Format of the model's tool calls: auto (the one that reads the chat template's own call), or
    a name from docs/tools.md, as hermes, qwen3_coder or mistral."""


class AlgorithmTuning(ConfigSection):
    """Further settings of losses, advantages and filters."""

    token_level_loss: bool = True
    """Average over all loss tokens of the step; with false, over the records."""
    skip_length_normalization: bool = False
    """With token_level_loss false: sum over a record instead of averaging."""
    drop_zero_advantage: bool = True
    """Exclude turns with advantage 0 from the batch."""
    skip_non_positive_advantage: bool = False
    """Exclude turns with advantage <= 0 from the batch."""
    minimal_advantage: float | None = None
    """Minimum advantage of a turn in the batch; unbounded by default."""
    beta1: float | None = None
    """CE-GPPO weight of tokens clipped from below; off by default."""
    beta2: float | None = None
    """CE-GPPO weight of tokens clipped from above; off by default."""
    importance_weight_cap_ratio: float = Field(default=4.0, ge=0)
    """Multiple of the clip range beyond which GRPO and MINIRL drop tokens; 0 drops none."""
    strict_in_bound: bool = False
    """Drop every token outside the clip range (GRPO and MINIRL)."""
    out_of_date_decay: float | None = None
    """Rate at which the drop range narrows with staleness (GRPO and MINIRL); off by default."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the ratio of tokens with negative advantage (GRPO and GSPO); off by default."""
    importance_weight_truncation: float | None = Field(default=None, gt=0)
    """Maximum importance weight of MINIRL; unbounded by default."""
    correction_level: CorrectionLevel = "token"
    """Unit that is weighted and masked: tokens, turns by the product of their ratios, or turns by
    the geometric mean."""
    correction_lower: float = Field(default=0.5, ge=0)
    """Lower bound of icepop and mis."""
    correction_upper: float = Field(default=2.0, gt=0)
    """Upper bound of tis, icepop and mis."""
    veto_threshold: float | None = Field(default=None, gt=0)
    """Ratio below which a token masks its whole turn; off by default."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL divergence per token."""
    teacher_wait_seconds: float = Field(default=1800.0, gt=0)
    """How long a step waits for teachers while complete groups are at hand; the run then ends, and
    the same command resumes it."""
    adv_scaling: float = 1.0
    """Factor on the advantages."""
    balance_sample: bool = False
    """Keep about as many correct as wrong records of a group."""
    min_turns: int = Field(default=1, ge=0)
    """Minimum number of turns of a correct record that is trained on."""
    reserve_context_error_count: int = Field(default=-1, ge=-1)
    """Maximum number of records per group that ended at a length or turn limit; -1 keeps all."""
    efficient_rewarding: bool = False
    """Shift scores by up to 0.1 in favor of correct records with few turns."""
    staleness_policy: Literal["drop", "wait"] = "drop"
    """`drop`: train on the groups that are complete, and drop records beyond max_staleness; `wait`:
    train on groups in their order; steps wait for the slowest group, and no record becomes too
    old."""
    max_trained_count: int = Field(default=1, ge=1, le=100)
    """Number of times that a step updates the weights with its batch."""


class TrainerTuning(ConfigSection):
    """Further settings of the optimizer, checkpoints and leases."""

    per_device_train_batch_size: int = Field(default=1, ge=1, le=1_000_000)
    """Records per micro-batch; used only if groups_per_step is not given. `agentrl sft`: 8
    conversations by default."""
    gradient_accumulation_steps: int = Field(default=48, ge=1, le=1_000_000)
    """Micro-batches per step; used only if groups_per_step is not given. `agentrl sft`: 1 by
    default."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    optim_args: Annotated[str, PLAIN] = "beta1=0.9,beta2=0.98"
    """AdamW's betas and eps: `beta1=..,beta2=..,eps=..`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm above which gradients are scaled down (clipped)."""
    verify_merge: int = Field(default=0, ge=0)
    """Interval in steps at which a step is also computed without merging; the run stops with a
    report if the gradients differ. 0: never."""
    loss_seq_chunk_size: int = Field(default=4096, ge=1)
    """Number of loss positions that pass through the LM head at a time."""
    log_entropy: bool = True
    """Compute and log the policy's entropy."""
    activation_offloading: bool = False
    """Keep activations for the backward pass, and what passes between the chunks of a long row, in
    host memory. Slower, with the same gradients; with gradient_checkpointing, only the layers'
    inputs are transferred."""
    dp_replicate_size: int = Field(default=1, ge=1)
    """Replicas of the sharded model (HSDP); the ranks of each replica shard it with FSDP2."""
    save_total_limit: int = Field(default=2, ge=1)
    """Number of checkpoints that are kept."""
    async_save: bool = False
    """Write checkpoints while training continues. After a crash during a write, the run resumes
    from the previous checkpoint."""
    full_determinism: bool = False
    """Use only deterministic algorithms, with bit-identical results; some are slower."""
    save_only_model: bool = False
    """Exclude the optimizer state from checkpoints. Such a run cannot resume exactly."""
    logging_steps: int = Field(default=1, ge=1)
    """Steps between two log lines."""
    peak_tflops: float | None = Field(default=None, gt=0)
    """Peak dense TFLOP/s of one device, for the model FLOPs utilization (`mfu`); known for current
    data-center GPUs."""
    eval_steps: int = Field(default=5, ge=1)
    """Steps between two evaluations."""
    eval_timeout_seconds: float = Field(default=3600.0, gt=0)
    """Timeout of an evaluation in seconds."""
    trained_scorer: Annotated[str | None, PLAIN] = Field(default=None, pattern=r"^[^@]+(@[^@]+)?$")
    """Scorer whose scores are trained on, NAME or NAME@VERSION; groups wait until all their records
    have its score (`agentrl store rescore`). By default the samplers' scores are used."""
    trainer_lease_seconds: float = Field(default=60.0, gt=1)
    """Seconds until the trainer's lease on the run expires without a heartbeat."""


class PublishTuning(ConfigSection):
    """How weights are sent."""

    publish_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running generations. `retract`: recomputed under the new weights; `in_place`:
    continued on the old cache; `abort`: interrupted, and resumed by the client."""
    publish_timeout_seconds: float = Field(default=120.0, gt=0)
    """Timeout of one server's update in seconds; a slower server is taken out of service."""
    weight_sync_host: Annotated[str, ADDRESS] = "127.0.0.1"
    """Address of this machine at which servers reach the trainer for `--weight_sync
    distributed`."""
    weight_sync_bucket_mb: int = Field(default=256, ge=1)
    """Maximum size of one broadcast, in MiB."""
    keep_policies: int = Field(default=2, ge=1)
    """Number of published weight directories that are kept, in addition to those in use."""
