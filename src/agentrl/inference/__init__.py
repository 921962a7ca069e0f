"""The only access to inference servers: SGLang's HTTP API, of SGLang and the embedded engine."""

from agentrl.inference.client.pool import ServerPool
from agentrl.inference.client.sglang_client import OnPartial, SGLangClient
from agentrl.inference.wire import GenerateRequest, GenerateResult

__all__ = ["GenerateRequest", "GenerateResult", "OnPartial", "SGLangClient", "ServerPool"]
