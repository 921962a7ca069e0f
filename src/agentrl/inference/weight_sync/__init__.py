"""Weight publishing: from the trainer to every inference server, on disk or by broadcast."""

from agentrl.inference.weight_sync.publisher import (
    PolicyFiles,
    PolicyPublisher,
    PublishReport,
    WriteFiles,
)
from agentrl.inference.weight_sync.server_operations import update_server
from agentrl.inference.weight_sync.version_files import AdapterNames

__all__ = [
    "AdapterNames",
    "PolicyFiles",
    "PolicyPublisher",
    "PublishReport",
    "WriteFiles",
    "update_server",
]
