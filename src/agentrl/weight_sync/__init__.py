"""New weights from the trainer to the servers."""

from agentrl.weight_sync.adapters import AdapterNames
from agentrl.weight_sync.publisher import (
    PolicyFiles,
    PolicyPublisher,
    PublishReport,
    WriteFiles,
)
from agentrl.weight_sync.update import update_server

__all__ = [
    "AdapterNames",
    "PolicyFiles",
    "PolicyPublisher",
    "PublishReport",
    "WriteFiles",
    "update_server",
]
