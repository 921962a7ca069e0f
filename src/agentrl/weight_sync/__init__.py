"""New weights from the trainer to the servers."""

from agentrl.weight_sync.publisher import PolicyPublisher, PublishReport
from agentrl.weight_sync.update import update_server

__all__ = ["PolicyPublisher", "PublishReport", "update_server"]
