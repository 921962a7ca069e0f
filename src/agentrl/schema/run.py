"""`Run`: the document that controls a run; and the servers and samplers that take part in it."""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import (
    AliasChoices,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from agentrl.schema.base import Value, utc_now
from agentrl.schema.ledger_origin import Retrain
from agentrl.schema.lost_versions import LostVersions, step_of
from agentrl.schema.record import Lease
from agentrl.schema.sampling_bounds import (
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Temperature,
    TokenPenalty,
    TopK,
    TopP,
)

SCHEMA_VERSION = 2
RunStatus = Literal["created", "training", "completed", "no_signal", "failed"]
"""`no_signal`: it ended, and hardly any group had anything to learn from."""
RunState = RunStatus | Literal["interrupted"]
"""The displayed status: an `interrupted` run is unfinished and has no active process. No process is
left to store this status, so the store derives it."""
RunPhase = Literal[
    "starting", "loading", "evaluating", "sampling", "training", "publishing", "interrupted"
]
"""The trainer's current activity: in `sampling` it waits for samples, and `interrupted` is the last
one of a run that a signal stopped."""
ENDED_RUNS: frozenset[RunStatus] = frozenset({"completed", "no_signal", "failed"})


class Control(Value):
    """Settings that may change during a run; samplers and trainer read them every second.

    None means the value that the process was started with. Without a value in the stored document,
    the others are those of the trainer's flags too.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    sampling_paused: bool = False
    """Samplers claim no further slots and finish the rollouts that they run."""
    max_staleness: int = Field(default=1, ge=0, le=1_000_000_000)
    """S of the freshness rules, in policy versions."""
    groups_per_step: int = Field(default=1, ge=1, le=1_000_000)
    """Groups that one optimizer step consumes."""
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    """Rollouts that one sampler process runs at the same time."""
    temperature: Temperature | None = None
    """Of training rollouts, like all sampling parameters below; evaluations keep theirs."""
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: TokenPenalty | None = None
    frequency_penalty: TokenPenalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: MaxNewTokens | None = None
    scorer: str | None = Field(default=None, min_length=1, max_length=200)
    """Name of the scorer of training rollouts, in place of the one that their task names."""

    def oldest_version(self, step: int) -> int:
        """Return the oldest version whose samples optimizer step `step` (from 1) may train on."""
        return max(0, step - 1 - self.max_staleness)

    def sampling(self) -> dict[str, float | int]:
        """Return the sampling parameters that are set, by their names in `SamplingParams`."""
        values = {name: getattr(self, name) for name in _SAMPLING_CONTROLS}
        return {name: value for name, value in values.items() if value is not None}


def usable_control(
    stored: Mapping[str, Any], of_flags: Mapping[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the stored controls without those that nobody can follow, and what is wrong with these.

    Args:
        stored: the controls of a document that anybody may have edited.
        of_flags: the controls that the trainer was started with, which replace missing ones.
    """
    known = {name: stored[name] for name in Control.model_fields if stored.get(name) is not None}
    try:
        Control.model_validate(known)
    except ValidationError as error:
        found = {str(one["loc"][0]): one for one in error.errors(include_url=False)}
        problems = (f"{name}: {one['msg']}, got {one['input']!r}" for name, one in found.items())
        known = {name: value for name, value in known.items() if name not in found}
        return {**of_flags, **known}, tuple(problems)
    return {**of_flags, **known}, ()


_SAMPLING_CONTROLS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "max_new_tokens",
)


ANY_AGE = Control(max_staleness=1_000_000_000)
"""Accepts samples of any age."""


class ControlChange(Value):
    """One change of a run's controls: the audit trail."""

    at: datetime
    by: str
    before: dict[str, Any] = Field(default_factory=dict)
    after: dict[str, Any] = Field(default_factory=dict)


class ConfigChange(Value):
    """Values of the configuration that a later start of the run replaced."""

    step: int
    """The last step before that start."""
    before: dict[str, Any]


TEACHER_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""Names become fields of documents."""


class Teacher(Value):
    """A model whose logprobs at the sampled tokens are kept: one for each name in a run."""

    model: str
    """Path or name of its checkpoint."""
    # Stored as one `prompt` by earlier releases.
    prompts: tuple[str, ...] = Field(
        default=("",), validation_alias=AliasChoices("prompts", "prompt")
    )
    """Texts before every conversation, for the teacher alone: the first whose values are all there."""
    solution_score: float = 1.0
    """Least score of the attempt that a prompt shows as a solution."""

    @field_validator("prompts", mode="before")
    @classmethod
    def _one_or_more(cls, prompts: Any) -> Any:
        return (prompts,) if isinstance(prompts, str) else prompts


class Run(Value):
    """State of the run; its `_id` is the run's name, which is also the database's."""

    name: str
    schema_version: int = SCHEMA_VERSION
    owner: str = ""
    """Who trained it first, `user@host`; empty before, and for runs of earlier releases."""
    status: RunStatus = "created"
    phase: RunPhase | None = None
    phase_at: datetime | None = None
    """When this phase began."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The resolved configuration of the last start, without secrets."""
    config_log: tuple[ConfigChange, ...] = ()
    """The last changes of `config`, oldest first."""
    text_digests: dict[str, str] = Field(default_factory=dict)
    """Digests of the model's chat template and vocabulary at the last start of the trainer."""
    teachers: dict[str, Teacher] = Field(default_factory=dict)
    """Name -> the teacher that first joined under it."""
    control: Control = Field(default_factory=Control)
    control_problems: tuple[str, ...] = Field(default=(), exclude=True)
    """What is wrong with values in the stored controls that `control` leaves out."""
    control_log: tuple[ControlChange, ...] = ()
    """The last changes of `control`, oldest first."""
    flag_control: Control | None = None
    """The trainer's flags when it was last started. A restart applies only flags that differ from
    these, so that it does not revert live changes."""
    policy_version: int = 0
    """The version that servers are expected to serve."""
    admitted_groups: int = 0
    """Training slots with `order` below this may be claimed. The trainer sets it to the number of
    consumed groups, including dropped ones, plus the new groups of at most (max_staleness + 1)
    steps, which bounds the running and finished but untrained records."""
    trainer_leases: dict[str, Lease] = Field(default_factory=dict)
    """Consumer name -> lease of the trainer that holds it."""
    retrains: dict[str, Retrain] = Field(default_factory=dict)
    """Name of each trainer that repeats steps (`agentrl retrain`) -> what it repeats."""
    trainer_has_device: bool = False
    """The servers are asleep or going to sleep, and the trainer computes on their device. Invalid once
    the trainer's lease has expired."""
    imported_policies: tuple[int, ...] | None = None
    """Of a run that was imported: the policy versions that came with it. Their files are those of
    another installation, so nothing reads them. None for a run of this installation."""
    saved_step: int = 0
    """Last step of which the trainer wrote a checkpoint."""
    lost_versions: tuple[LostVersions, ...] = ()
    """Versions whose weights are lost, oldest first; no number is given twice."""
    expired_step: int = 0
    """The turns of groups that steps up to this one consumed have expired."""
    turns_name_blobs: bool = False
    """Whether every turn lists the blobs that it refers to; those of earlier releases do not."""
    created_at: datetime = Field(default_factory=utc_now)
    updated_at: datetime = Field(default_factory=utc_now)

    @model_validator(mode="before")
    @classmethod
    def _leave_out_bad_controls(cls, fields: Any) -> Any:
        # Any edit of the document would otherwise end all processes that read it.
        if not isinstance(fields, dict) or not isinstance(stored := fields.get("control"), dict):
            return fields
        of_flags = fields.get("flag_control")
        control, problems = usable_control(stored, of_flags if isinstance(of_flags, dict) else {})
        return {**fields, "control": control, "control_problems": problems}

    @field_validator("lost_versions", mode="before")
    @classmethod
    def _leave_out_given_again(cls, lost: Any) -> Any:
        # Earlier releases gave the numbers again, and noted until when they were those of lost weights.
        return [one for one in lost if not (isinstance(one, dict) and "until" in one)]

    @property
    def step(self) -> int:
        """Optimizer steps that made the served version."""
        return step_of(self.policy_version, self.lost_versions)

    @property
    def is_imported(self) -> bool:
        """Whether somebody else may have written its documents."""
        return self.imported_policies is not None

    def config_at(self, step: int) -> dict[str, Any]:
        """Return the configuration with which a step was computed."""
        values = dict(self.config)
        for change in reversed(self.config_log):
            if change.step < step:
                break
            values.update(change.before)
        return values


ServiceStatus = Literal["up", "updating", "asleep", "down"]
"""`updating` and `asleep` servers hold requests until they resume; an `asleep` server has released the
memory of weights and cache to the trainer."""

_FULL_SHARE = 0.9
_ROOMY_SHARE = 0.7
"""With less of the memory in use, requests wait for a place, or for their first step."""
_QUEUE_SHARE = 8


class ServerLoad(Value):
    """Load that an inference server reported."""

    num_running: int
    num_waiting: int
    max_running: int = 0
    """Requests that the server runs at once; 0: it does not say."""
    num_used_tokens: int = 0
    """Tokens whose keys and values running requests hold."""
    token_usage: float
    """Share of the key and value memory that running requests take."""
    tokens_per_second: float = 0.0
    """Tokens that the server samples a second, those of unfinished replies included."""
    at: datetime = Field(default_factory=utc_now)

    @property
    def is_pressed(self) -> bool:
        """Whether further requests would only wait or evict others from the cache.

        A short queue is normal: requests that arrive during a step wait for the next one.
        """
        return self.token_usage >= _FULL_SHARE or self._has_queue

    @property
    def lacks_memory(self) -> bool:
        """Whether it is pressed, and not only because all of its places are taken."""
        is_roomy = self.max_running > 0 and self.token_usage < _ROOMY_SHARE
        return self.is_pressed and not is_roomy

    @property
    def _has_queue(self) -> bool:
        return self.num_waiting > max(1, self.num_running // _QUEUE_SHARE)


class InferenceService(Value):
    """An inference server that registered itself and heartbeats."""

    id: str
    base_url: str
    backend: Literal["embedded", "sglang"]
    model_path: str
    status: ServiceStatus = "up"
    policy_version: int = 0
    adapter: str | None = None
    """Name of the adapter that requests must name for that version; None for the model alone."""
    error: str | None = None
    data_proof: str | None = None
    control_proof: str | None = None
    """Proofs that the process that registered it has the keys (`agentrl.inference.server_keys`)."""
    takes_priorities: bool = False
    """Waiting requests go by their priority; otherwise, some servers refuse a request that has one."""
    load: ServerLoad | None = None
    """From the last heartbeat; None during an update, or if the server does not report it."""
    release: str = ""
    """The version of AgentRL that registered it; earlier releases do not say."""
    started_at: datetime = Field(default_factory=utc_now)
    heartbeat_at: datetime = Field(default_factory=utc_now)


class SamplerInfo(Value):
    """A sampler process as it last reported itself."""

    id: str
    """The lease owner string of the process."""
    host: str
    pid: int
    status: Literal["sampling", "draining", "stopped"] = "sampling"
    num_running: int = 0
    num_finished: int = 0
    num_output_tokens: int = 0
    seconds_waiting: dict[str, float] = Field(default_factory=dict)
    """Time spent with nothing to do, by reason (`admission`, `no_task`, `no_server`, `paused`)."""
    notice: str = ""
    """A notice for people, if any."""
    generates: bool = True
    """It runs rollouts; False: it only scores those of others."""
    cordoned_by: str = ""
    """Who told it to claim nothing more (`agentrl store cordon`); empty for nobody."""
    release: str = ""
    """The version of AgentRL that it runs; as for servers."""
    started_at: datetime = Field(default_factory=utc_now)
    heartbeat_at: datetime = Field(default_factory=utc_now)
