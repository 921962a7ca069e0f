"""Weight publishing: from the trainer to every inference server, on disk or by broadcast."""

from agentrl.inference.weight_sync.publisher import (
    PolicyPublisher,
    PublishReport,
    WriteFiles,
)
from agentrl.inference.weight_sync.server_operations import update_server
from agentrl.inference.weight_sync.version_files import AdapterNames

__all__ = [
    "AdapterNames",
    "PolicyPublisher",
    "PublishReport",
    "WriteFiles",
    "update_server",
]
