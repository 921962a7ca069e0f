"""The only door to inference servers: SGLang's HTTP, spoken by SGLang and the embedded engine."""

from agentrl.inference.client import OnPartial, SGLangClient
from agentrl.inference.pool import ServerPool
from agentrl.inference.wire import GenerateRequest, GenerateResult

__all__ = ["GenerateRequest", "GenerateResult", "OnPartial", "SGLangClient", "ServerPool"]
