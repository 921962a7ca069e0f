"""AgentRL: reinforcement learning for language-model agents, decoupled through a document store."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.integrations import AgentTrainer
    from agentrl.plugins.inspector.diff_run import diff_policies
    from agentrl.plugins.own_loops import open_run
    from agentrl.schema import AgentResult

    __version__: str

__all__ = ["AgentResult", "AgentTrainer", "__version__", "diff_policies", "open_run"]


def __getattr__(name: str) -> Any:
    """Import what is asked for, or look the version up.

    A sampler never needs the trainer's imports, and only an installed package has a version.
    """
    if name == "AgentTrainer":
        from agentrl.integrations import AgentTrainer  # noqa: PLC0415

        return AgentTrainer
    if name == "AgentResult":
        from agentrl.schema import AgentResult  # noqa: PLC0415

        return AgentResult
    if name == "diff_policies":
        from agentrl.plugins.inspector.diff_run import diff_policies  # noqa: PLC0415

        return diff_policies
    if name == "open_run":
        from agentrl.plugins.own_loops import open_run  # noqa: PLC0415

        return open_run
    if name == "__version__":
        from agentrl.runtime.installation import package_version  # noqa: PLC0415

        return package_version()
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
