"""`Run`: the one document that steers a run, and the processes that take part in it."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from agentrl.schema.base import Value, utc_now
from agentrl.schema.records import Lease

SCHEMA_VERSION = 1
RunStatus = Literal["created", "training", "completed", "failed"]


class Control(Value):
    """What may be changed while the run is going on; samplers look once a second."""

    sampling_paused: bool = False
    max_staleness: int = 1
    """S of the freshness rules, in policy versions."""
    records_per_step: int = 1
    """Records that one optimizer step consumes (groups a step x generations)."""


class Run(Value):
    """State of the run; its `_id` is the run's name, which is also the database's."""

    name: str
    schema_version: int = SCHEMA_VERSION
    status: RunStatus = "created"
    config: dict[str, Any] = Field(default_factory=dict)
    """The resolved configuration, secrets left out."""
    control: Control = Field(default_factory=Control)
    policy_version: int = 0
    """The version that servers are expected to serve."""
    admitted_records: int = 0
    """Training slots may be claimed while fewer than this many were ever claimed in the stream:
    the trainer raises it as it consumes (the admission rule of the design)."""
    trainer_leases: dict[str, Lease] = Field(default_factory=dict)
    """Consumer name -> lease of the trainer that holds it."""
    created_at: datetime = Field(default_factory=utc_now)
    updated_at: datetime = Field(default_factory=utc_now)


ServiceStatus = Literal["up", "updating", "down"]


class InferenceService(Value):
    """An inference server that registered itself and heartbeats."""

    id: str
    base_url: str
    backend: Literal["embedded", "sglang"]
    model_path: str
    status: ServiceStatus = "up"
    policy_version: int = 0
    error: str | None = None
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
    started_at: datetime = Field(default_factory=utc_now)
    heartbeat_at: datetime = Field(default_factory=utc_now)
