"""New weights from the trainer to the servers."""

from agentrl.inference.weight_sync.adapter_names import AdapterNames
from agentrl.inference.weight_sync.publisher import (
    PolicyFiles,
    PolicyPublisher,
    PublishReport,
    WriteFiles,
)
from agentrl.inference.weight_sync.server_update import update_server

__all__ = [
    "AdapterNames",
    "PolicyFiles",
    "PolicyPublisher",
    "PublishReport",
    "WriteFiles",
    "update_server",
]
