"""Every error that AgentRL raises on purpose; no other module defines one that crosses a package.

    AgentRLError
    ├── ConfigError (ValueError)      a flag, a file or a value that the user gave is wrong
    │   └── DatasetError              a dataset is missing, or one of its lines is malformed
    ├── NothingToLearn                the first answers have equal scores, and the user asked to stop
    ├── StoreError                    MongoDB is unreachable or refused a request
    │   ├── StoreUnreachable          MongoDB does not respond; it may later
    │   ├── DataInUse                 another process serves the data of a private mongod
    │   ├── LeaseLost                 another process owns the document now; write nothing more
    │   │   └── RunDropped            the run's documents are gone
    │   └── TrainerBusy               a second trainer asked for a consumer that is in use
    ├── InferenceError                an inference server failed or refused a request
    │   ├── NoServerAvailable         no registered server is up
    │   ├── ServerUnreachable         a server gave no answer; another one may
    │   │   └── ServerLost            it dropped the connection during a request
    │   ├── ServerRefused             a server answered with an error status
    │   ├── PoisonousRequest          servers died under a request, which is not sent again
    │   └── ServerUnusable            a supervised server must be restarted
    ├── ToolError                     the tools' infrastructure failed (not a tool's own error)
    ├── ToolCallFailed                a call has no result, although the server is healthy
    │   ├── CallTimedOut              the tool took too long
    │   └── InvalidResult             the result breaks MCP or the tool's own schema
    ├── UnreadableReply               a server's reply is compressed, too long or no JSON
    ├── AgentError                    an agent could not be run, which says nothing of the policy
    │   └── AgentWorkerError          the process that runs it ended, or could not reach what it needs
    ├── UserCodeError                 the user's agent or reward function raised; the rollout counts
    ├── APIError                      a model call of an agent is answered with an error
    ├── RenderError                   a chat template or tokenizer cannot do what is asked
    ├── ImageError                    an image cannot be read, or is too large
    ├── ScoringError                  a scorer could not decide; the score stays missing
    │   └── ScorerDefect              a scoring function has a defect that no retry fixes
    │       └── ScorerTimeout         it exceeded its time limit
    ├── TrainingError                 optimization cannot continue (non-finite losses or gradients)
    ├── WriteError                    a directory of the run could not be written to disk
    └── BroadcastError                a process group for broadcasts failed or did not form

The rules:

- User mistakes are `ConfigError`s, and commands raise them before they start any process.
- The text is one line that says what is wrong and what to do about it. It never holds a secret.
- Errors cross processes, so every class survives pickling: pass every argument to
  `super().__init__`.
- A package raises the class that names its own trouble; the package above translates it where its
  caller needs another word. Exceptions that only steer the control flow inside one module are
  private to that module.
"""

import os
from typing import ClassVar


class AgentRLError(Exception):
    """Base of all AgentRL errors.

    Attributes:
        exit_status: of a command that ends with the error.
    """

    exit_status: ClassVar[int] = 1


class ConfigError(AgentRLError, ValueError):
    """The user gave a flag, a file or a value that cannot be used."""

    exit_status = 2


class NothingToLearn(AgentRLError):
    """The first answers of the model have equal scores, and the user asked to stop then."""

    exit_status = 3


class DatasetError(ConfigError):
    """A dataset is missing, or one of its lines is malformed; the message names the line."""


class StoreError(AgentRLError):
    """MongoDB is unreachable or refused a request."""


class StoreUnreachable(StoreError):
    """MongoDB does not respond. A process that ends for this may be started again."""

    exit_status = os.EX_TEMPFAIL


class DataInUse(StoreError):
    """Another process serves the data of a private mongod.

    Attributes:
        holder: that process in words: its command, host, pid and start.
    """

    def __init__(self, message: str, holder: str) -> None:
        super().__init__(message, holder)
        self.holder = holder

    def __str__(self) -> str:
        return str(self.args[0])


class LeaseLost(StoreError):
    """Another process took the lease; its former holder must stop writing."""


class RunDropped(LeaseLost):
    """The run's documents are gone, and all leases with them."""


class TrainerBusy(StoreError):
    """Another trainer holds the consumer name on this run."""


class InferenceError(AgentRLError):
    """An inference server failed or refused a request."""


class NoServerAvailable(InferenceError):
    """No registered inference server is up."""


class ServerUnreachable(InferenceError):
    """The server gave no answer: it is down or restarting, or the network is. Try another one."""


class ServerLost(ServerUnreachable):
    """The server dropped the connection during a request, which may have crashed it."""


class PoisonousRequest(InferenceError):
    """Servers died under a request. It is not sent again: it would end one server after another."""


class ServerRefused(InferenceError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status, or the one that an aborted generation carried.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later or on another server."""
        return self.status >= 500 or self.status in (408, 429) or self.lacks_adapter

    @property
    def lacks_adapter(self) -> bool:
        """Whether the request named an adapter that was unloaded; its successor is announced soon."""
        return self.status == 400 and "not loaded" in str(self)


class ServerUnusable(InferenceError):
    """A supervised server is in a state that only a restart can end."""


class ToolError(AgentRLError):
    """The infrastructure behind a tool failed; the model did nothing wrong."""


class ToolCallFailed(AgentRLError):
    """A tool call has no result, although the server is healthy. The model is told."""


class CallTimedOut(ToolCallFailed):
    """The tool took longer than allowed."""


class InvalidResult(ToolCallFailed):
    """The server returned a result that MCP, or its own description of the tool, forbids."""


class UnreadableReply(AgentRLError):
    """A server's reply is compressed, longer or denser than what is read, or no JSON."""


class AgentError(AgentRLError):
    """An agent could not be run, which says nothing about the policy."""


class AgentWorkerError(AgentError):
    """A worker process ended, or could not reach what it needs; the agent is not to blame."""


class UserCodeError(AgentRLError):
    """The user's agent or reward function raised: its own failure, not the infrastructure's."""


class APIError(AgentRLError):
    """A model call of an agent that is answered with an error.

    Attributes:
        status: the HTTP status. Clients retry 408, 409, 429 and 5xx, and no others.
        code: the machine-readable reason; clients know `model_not_found` and
            `context_length_exceeded`.
        param: the field of the request at fault, if one is.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class RenderError(AgentRLError):
    """A chat template or tokenizer cannot do what is asked of it."""


class ImageError(AgentRLError):
    """An image cannot be read by a model's processor, or is larger than anything is decoded."""


class ScoringError(AgentRLError):
    """A scorer could not decide; the score stays missing and is tried again."""


class ScorerDefect(ScoringError):
    """A scoring function raised, or returned no number, because of a bug in it.

    Attributes:
        kind: the function, the type of what it raised and where; the same for the same mistake.
        is_certain: a further try would take long, and have the same end.
    """

    def __init__(self, message: str, kind: str, is_certain: bool = False) -> None:
        super().__init__(message, kind, is_certain)
        self.kind = kind
        self.is_certain = is_certain

    def __str__(self) -> str:
        return str(self.args[0])


class ScorerTimeout(ScorerDefect):
    """A scoring function takes longer than it may; it runs on where it was begun."""


class TrainingError(AgentRLError):
    """Optimization cannot continue: losses or gradients stay non-finite."""


class WriteError(AgentRLError):
    """A directory of the run (a checkpoint, weights) could not be written to disk."""


class BroadcastError(AgentRLError):
    """A process group for broadcasts did not form, or a member of it failed or left."""
