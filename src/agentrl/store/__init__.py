"""The trajectory store: the only package that accesses MongoDB."""

from typing import TYPE_CHECKING, Any

from agentrl.store.repositories.runs import DEFAULT_CONSUMER
from agentrl.store.repositories.task_groups import ReapCounts
from agentrl.store.trajectory_store import TrajectoryStore

if TYPE_CHECKING:
    from agentrl.store.views.reports import RunProgress

__all__ = ["DEFAULT_CONSUMER", "ReapCounts", "RunProgress", "TrajectoryStore"]


def __getattr__(name: str) -> Any:
    """Import `RunProgress` when it is asked for: samplers need no reports."""
    if name == "RunProgress":
        from agentrl.store.views.reports import RunProgress  # noqa: PLC0415

        return RunProgress
    raise AttributeError(f"module 'agentrl.store' has no attribute {name!r}")
