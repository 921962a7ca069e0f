"""The trajectory store: the only package that accesses MongoDB."""

from agentrl.store.repositories.runs import DEFAULT_CONSUMER
from agentrl.store.repositories.task_groups import ReapCounts
from agentrl.store.trajectory_store import TrajectoryStore
from agentrl.store.views.reports import RunProgress

__all__ = ["DEFAULT_CONSUMER", "ReapCounts", "RunProgress", "TrajectoryStore"]
