"""Every error that AgentRL raises on purpose.

    AgentRLError
    ├── ConfigError (ValueError)      a flag, file or value that the user gave is wrong
    │   └── DatasetError              a dataset line is missing or malformed
    ├── StoreError                    MongoDB is unreachable or refused a request
    │   ├── LeaseLost                 another process owns the document now; write nothing more
    │   └── TrainerBusy               a second trainer asked for a consumer that is in use
    ├── InferenceError                an inference server failed or refused a request
    │   └── NoServerAvailable         no registered server is up
    ├── ToolError                     the tool side's infrastructure failed (not a tool's own error)
    ├── AgentError                    an agent's own code failed, which says nothing of the policy
    ├── RenderError                   a chat template or tokenizer cannot do what is asked
    ├── ScoringError                  a scorer could not decide; the score stays missing
    ├── TrainingError                 optimisation cannot go on (non-finite losses or gradients)
    └── PublishError                  weights could not be written or handed to any server

User mistakes are `ConfigError`s and are raised before any process starts. The text of every error
is one line that says what is wrong and what to do about it; secrets never appear in it.
"""


class AgentRLError(Exception):
    """Base of all AgentRL errors."""


class ConfigError(AgentRLError, ValueError):
    """The user gave a flag, file or value that cannot be used."""


class DatasetError(ConfigError):
    """A dataset file is missing, or one of its lines is malformed (the line number is named)."""


class StoreError(AgentRLError):
    """MongoDB is unreachable or refused a request."""


class LeaseLost(StoreError):
    """The lease was taken by another process; its former holder must stop writing."""


class TrainerBusy(StoreError):
    """Another trainer holds the consumer name on this run."""


class InferenceError(AgentRLError):
    """An inference server failed or refused a request."""


class NoServerAvailable(InferenceError):
    """No registered inference server is up."""


class ToolError(AgentRLError):
    """The infrastructure behind a tool failed; the model did nothing wrong."""


class AgentError(AgentRLError):
    """An agent's own code failed in a way that says nothing about the policy."""


class RenderError(AgentRLError):
    """A chat template or tokenizer cannot do what is asked of it."""


class ScoringError(AgentRLError):
    """A scorer could not decide; the score stays missing and is tried again."""


class TrainingError(AgentRLError):
    """Optimisation cannot go on: losses or gradients stay non-finite."""


class PublishError(AgentRLError):
    """Weights could not be written, or no server accepted them."""
