"""Checks of inference servers before a run: given ones must respond, others must be startable.

Input: the section of the servers. Output: a description of them, or the first problem. Nothing is
started.
"""

import asyncio
import shlex
from collections.abc import Sequence
from contextlib import suppress

import httpx
from pydantic import SecretStr

from agentrl.config.sections import InferenceSection
from agentrl.errors import ConfigError, InferenceError, ServerRefused
from agentrl.inference import SGLangClient
from agentrl.inference.supervisor.server_process import check_keys
from agentrl.inference.supervisor.sglang_backend import sglang_python

_RESPONSE_SECONDS = 4.0


async def check_servers(inference: InferenceSection) -> str:
    """Check that servers respond, or can be started; return a description of them."""
    if not inference.inference_urls:
        check_keys(inference)
        if inference.inference_backend == "embedded":
            return "the embedded engine, which `agentrl run` starts"
        return f"SGLang of {shlex.join(sglang_python())}, which `agentrl run` starts"
    for url in inference.inference_urls:
        await _check_responds("--inference_urls", url)
        await _check_is_server(url, inference.inference_api_key)
    if inference.inference_gateway is not None:
        await _check_responds("--inference_gateway", inference.inference_gateway)
    return f"{len(inference.inference_urls)} of --inference_urls respond"


async def open_servers(urls: Sequence[str]) -> list[str]:
    """Return the addresses whose servers answer requests without a key."""
    found = []
    for url in urls:
        async with SGLangClient(url) as client:
            with suppress(InferenceError, TimeoutError):
                async with asyncio.timeout(_RESPONSE_SECONDS):
                    await client.model_info()
                    found.append(url)
    return found


async def _check_responds(flag: str, url: str) -> None:
    # A run connects to its servers directly, so this check ignores proxies, too.
    async with httpx.AsyncClient(timeout=_RESPONSE_SECONDS, trust_env=False) as client:
        try:
            async with client.stream("GET", f"{url.rstrip('/')}/health"):
                return  # the content is irrelevant and may be endless
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ConfigError(
                f"{flag} {url}: no server responds there ({type(error).__name__}); start it, or "
                "remove the flag"
            ) from None


async def _check_is_server(url: str, key: SecretStr | None) -> None:
    """Reject an address that responds but cannot receive weights, such as a gateway."""
    async with SGLangClient(url, api_key=key) as client:
        try:
            async with asyncio.timeout(_RESPONSE_SECONDS):
                await client.model_info()
        except (InferenceError, TimeoutError) as error:
            hint = "see its log"
            if isinstance(error, ServerRefused) and error.status == 401:
                hint = "set its key in AGENTRL_API_KEY"
            elif isinstance(error, ServerRefused) and error.status == 404:
                hint = (
                    "give the addresses of the servers, and that of a gateway with "
                    "--inference_gateway"
                )
            raise ConfigError(
                f"--inference_urls {url} is not an inference server: {hint}"
            ) from None
