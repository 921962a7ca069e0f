"""The only door to MongoDB."""

from agentrl.store.groups import ReapCounts
from agentrl.store.ledger import DEFAULT_CONSUMER
from agentrl.store.progress import Progress
from agentrl.store.store import TrajectoryStore

__all__ = ["DEFAULT_CONSUMER", "Progress", "ReapCounts", "TrajectoryStore"]
