"""The documents and values of AgentRL: frozen, validated, without I/O."""

from agentrl.schema.base import Logprobs, Message, TokenIds, utc_now
from agentrl.schema.records import (
    RECORD_TRANSITIONS,
    TERMINAL_STATUSES,
    Attempt,
    Lease,
    Outcome,
    Record,
    RecordStatus,
    Score,
)
from agentrl.schema.runs import (
    SCHEMA_VERSION,
    Control,
    InferenceService,
    Run,
    RunStatus,
    SamplerInfo,
    ServiceStatus,
)
from agentrl.schema.tasks import TASK_TYPES, MCPTask, Split, Task, register_task_type
from agentrl.schema.training import DBRecordData, LedgerEntry, LedgerStatus, Policy
from agentrl.schema.turns import (
    DispatchedSamplingTask,
    FinishReason,
    SamplingParams,
    ToolCall,
    ToolResult,
    VersionSpan,
    rebuild_prompts,
    token_versions,
)

__all__ = [
    "RECORD_TRANSITIONS",
    "SCHEMA_VERSION",
    "TASK_TYPES",
    "TERMINAL_STATUSES",
    "Attempt",
    "Control",
    "DBRecordData",
    "DispatchedSamplingTask",
    "FinishReason",
    "InferenceService",
    "Lease",
    "LedgerEntry",
    "LedgerStatus",
    "Logprobs",
    "MCPTask",
    "Message",
    "Outcome",
    "Policy",
    "Record",
    "RecordStatus",
    "Run",
    "RunStatus",
    "SamplerInfo",
    "SamplingParams",
    "Score",
    "ServiceStatus",
    "Split",
    "Task",
    "TokenIds",
    "ToolCall",
    "ToolResult",
    "VersionSpan",
    "rebuild_prompts",
    "register_task_type",
    "token_versions",
    "utc_now",
]
