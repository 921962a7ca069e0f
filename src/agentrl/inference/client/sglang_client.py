"""Client of one inference server: SGLang's native HTTP, as the embedded engine speaks it too."""

import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import BytesIO
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import aiohttp
import orjson
from pydantic import SecretStr

from agentrl.errors import InferenceError, ServerRefused, ServerUnreachable
from agentrl.inference.wire import (
    GenerateRequest,
    GenerateResult,
    parse_partial,
    parse_result,
    policy_version,
    request_body,
)
from agentrl.schema import ServerLoad

# Servers close idle connections after 5 s; reusing one at that moment fails.
_KEEPALIVE_SECONDS = 3.0
_CONNECT_SECONDS = 5.0
_CONTROL_SECONDS = 300.0
_PROBES = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 40_000,
}
"""When a silent connection is asked whether its peer is there: after 20 s, every 5 s, 4 times; and
the longest wait, in ms, for what was sent to be acknowledged."""
_HEALTH_SECONDS = 30.0
_JSON_BODY = {"Content-Type": "application/json"}

OnPartial = Callable[[GenerateResult], None]
"""Is told what was sampled so far, every few tokens."""


@dataclass(frozen=True)
class ModelInfo:
    """What a server says about its model."""

    model_path: str
    weight_version: int
    """Policy version; labels that are no number are version 0."""


class TensorList(Protocol):
    """Which tensors are broadcast, in this order."""

    @property
    def names(self) -> Sequence[str]:
        """Their names in the checkpoint."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Torch's names without `torch.`."""

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """Their shapes."""


class SGLangClient:
    """Async context manager around one server's routes.

    Every failure is an `InferenceError` that names the address; answers with an error status are
    `ServerRefused`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: SecretStr | None = None,
        admin_key: SecretStr | None = None,
        generate_timeout_seconds: float | None = None,
    ) -> None:
        """Prepare a client, inside a running event loop.

        Args:
            base_url: for example `http://127.0.0.1:30000`.
            api_key: bearer key of the data routes.
            admin_key: bearer key of the control routes; the API key when not given.
            generate_timeout_seconds: longest wait for a generation; None waits as long as the
                connection lives, since a paused server holds requests open.
        """
        self.base_url = base_url.rstrip("/")
        self._data_headers = _bearer(api_key)
        self._control_headers = _bearer(admin_key or api_key)
        self._generate_timeout = aiohttp.ClientTimeout(
            generate_timeout_seconds, sock_connect=_CONNECT_SECONDS
        )
        self._control_timeout = aiohttp.ClientTimeout(
            _CONTROL_SECONDS, sock_connect=_CONNECT_SECONDS
        )
        # Not httpx: its pool looks at every connection for every request, which at 64 generations
        # at a time cost more than all else that a rollout does.
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEPALIVE_SECONDS,
                socket_factory=_socket_that_notices_a_dead_peer,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def generate(
        self, request: GenerateRequest, on_partial: OnPartial | None = None
    ) -> GenerateResult:
        """Sample a continuation; blocks while the server is paused.

        Cancelling the call aborts the generation on the server.

        Args:
            request: what to sample.
            on_partial: is told how far it got while it goes on.
        """
        sending = self._answer(
            "POST",
            "/generate",
            request_body(request, stream=on_partial is not None),
            headers=self._data_headers,
            limits=self._generate_timeout,
        )
        async with sending as response:
            if on_partial is None:
                whole = _json(await response.read(), self.base_url)
                return parse_result(whole, self.base_url, adapter=request.adapter)
            async for frame in _frames(response):
                body = _json(frame, self.base_url)
                if "error" in body:
                    raise ServerRefused(
                        f"{self.base_url} gave a generation up: {error_message(body)}",
                        _error_status(body["error"]),
                    )
                if (body.get("meta_info") or {}).get("finish_reason") is not None:
                    return parse_result(body, self.base_url, adapter=request.adapter)
                on_partial(parse_partial(body, self.base_url, adapter=request.adapter))
        raise ServerUnreachable(f"{self.base_url} ended a stream before its end")

    async def pause(self, mode: Literal["abort", "retract", "in_place"]) -> None:
        """Hold all generations."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        """Let generations go on."""
        await self._control("/continue_generation", {})

    async def update_weights_from_disk(
        self, path: str, *, weight_version: str, flush_cache: bool = True
    ) -> None:
        """Load weights from a Hugging Face directory that the server can read."""
        await self._control(
            "/update_weights_from_disk",
            {
                "model_path": path,
                "load_format": "auto",
                "weight_version": weight_version,
                "flush_cache": flush_cache,
                "abort_all_requests": False,
            },
        )

    async def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Join a process group; returns when all of its ranks are there."""
        await self._control(
            "/init_weights_update_group",
            {
                "master_address": host,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": name,
                "backend": backend,
            },
        )

    async def destroy_weights_update_group(self, name: str) -> None:
        """Leave a process group."""
        await self._control("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        """Open the session in which weights come over a process group."""
        await self._control("/begin_weight_update", {})

    async def end_weight_update(self) -> None:
        """Close that session."""
        await self._control("/end_weight_update", {})

    async def update_weights_from_distributed(
        self,
        tensors: TensorList,
        *,
        group: str,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Take some weights from the next broadcasts of a group, one of every tensor."""
        await self._control(
            "/update_weights_from_distributed",
            {
                "names": list(tensors.names),
                "dtypes": list(tensors.dtypes),
                "shapes": [list(shape) for shape in tensors.shapes],
                "group_name": group,
                "weight_version": weight_version,
                "flush_cache": flush_cache,
                "abort_all_requests": False,
            },
        )

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter (LoRA) that the server can read, beside the model; nothing is paused."""
        await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter out; returns when the generations that use it have ended."""
        await self._control("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that may be asked for."""
        models = (await self._get("/v1/models")).get("data") or []
        return tuple(str(model["id"]) for model in models if model.get("parent") is not None)

    async def update_weight_version(self, version: str) -> None:
        """Change the label of the weights, nothing else."""
        await self._control(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._control("/flush_cache", {})

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Have a server give memory back, of `weights` or of the `kv_cache`.

        SGLang ends its scheduler when generations are running: pause it and flush its cache first.
        """
        await self._control("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Have a server take released memory again; what was in it is lost.

        SGLang ends its scheduler when it was not released.
        """
        await self._control("/resume_memory_occupation", {"tags": list(tags)})

    async def abort(self, rid: str | None = None) -> None:
        """Cut one generation, or all of them when no id is given."""
        await self._control("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def health(self) -> bool:
        """Return whether the server is there and ready."""
        timeout = aiohttp.ClientTimeout(_HEALTH_SECONDS)
        try:
            async with self._http.get(f"{self.base_url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def model_info(self) -> ModelInfo:
        """Return what the server says about its model."""
        info = await self._get("/model_info")
        return ModelInfo(
            model_path=str(info.get("model_path", "")),
            weight_version=policy_version(info.get("weight_version")),
        )

    async def server_info(self) -> Mapping[str, Any]:
        """Return the server's arguments and state."""
        return await self._get("/server_info")

    async def loads(self) -> ServerLoad:
        """Return how busy the server is, over all of its data-parallel workers.

        Raises:
            ServerRefused: with status 404 where the server has no such route.
        """
        ranks = (await self._get("/v1/loads?include=core")).get("loads") or []
        usages = [float(rank.get("token_usage") or 0.0) for rank in ranks]
        return ServerLoad(
            num_running=sum(int(rank.get("num_running_reqs") or 0) for rank in ranks),
            num_waiting=sum(int(rank.get("num_waiting_reqs") or 0) for rank in ranks),
            num_used_tokens=sum(int(rank.get("num_used_tokens") or 0) for rank in ranks),
            token_usage=sum(usages) / len(usages) if usages else 0.0,
        )

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._send("POST", path, body, headers=self._control_headers)

    async def _get(self, path: str) -> Mapping[str, Any]:
        body = _json(await self._send("GET", path, None, headers=self._data_headers), self.base_url)
        if not isinstance(body, dict):
            raise InferenceError(f"{self.base_url}{path}: expected a JSON object")
        return body

    async def _send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        headers: dict[str, str],
    ) -> bytes:
        """Return the body of a successful answer."""
        async with self._answer(method, path, body, headers=headers) as response:
            return await response.read()

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        headers: dict[str, str],
        limits: aiohttp.ClientTimeout | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a successful answer whose body is still to be read.

        Raises:
            ServerUnreachable: there was none, or reading it failed.
            ServerRefused: it has an error status.
        """
        url = self.base_url + path
        try:
            async with self._http.request(
                method,
                url,
                # From a file, long bodies are sent in pieces, and others have their turn between.
                data=None if body is None else BytesIO(_encoded(body, url)),
                headers=headers | _JSON_BODY if body is not None else headers,
                timeout=limits or self._control_timeout,
            ) as response:
                if response.status >= 400:
                    text = _error_text(await response.read(), response.reason)
                    raise ServerRefused(
                        f"{url} answered {response.status}: {text}", response.status
                    )
                yield response
        except TimeoutError as error:
            raise ServerUnreachable(
                f"{url} did not answer in time ({type(error).__name__})"
            ) from error
        except aiohttp.ClientError as error:
            raise ServerUnreachable(
                f"{url} cannot be reached ({type(error).__name__}); check that the server runs there"
            ) from error


async def _frames(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events up to `[DONE]`."""
    buffer = bytearray()
    # Not by lines: aiohttp bounds their length, and a frame holds all tokens so far.
    async for chunk in response.content.iter_any():
        buffer += chunk
        while (end := buffer.find(b"\n\n")) >= 0:
            data = bytes(buffer[:end]).removeprefix(b"data:").strip()
            del buffer[: end + 2]
            if data == b"[DONE]":
                return
            yield data


def _error_status(error: object) -> int:
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) else 500


def _socket_that_notices_a_dead_peer(address: aiohttp.AddrInfoType) -> socket.socket:
    """Return a socket whose connection fails when nobody is at its other end any more.

    A generation may take as long as it likes, so there is no bound on the wait for its answer. A
    machine that lost power or its network does not close its connections; the kernel has to ask.
    """
    family, kind, protocol, _, _ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _PROBES.items():
        if hasattr(socket, option):  # each system has its own
            opened.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return opened


def error_message(body: object) -> str:
    """Return what an error body says, in any of the shapes that SGLang answers with.

    The shapes are `{"error": {"message": ..}}`, `{"error": ".."}`, `{"message": ..}` (with
    `object: error`, or `success: false`), `{"error_message": ..}` of the adapters' routes and the
    framework's `{"detail": ..}`.
    """
    if not isinstance(body, Mapping):
        return str(body).strip()[:500]
    fields: Mapping[str, Any] = body
    error = fields.get("error")
    if isinstance(error, Mapping):
        return str(error.get("message", error))
    for value in (error, *(fields.get(n) for n in ("message", "error_message", "detail"))):
        if value:
            return str(value)
    return str(dict(fields))[:500]


def _error_text(content: bytes, reason: str | None) -> str:
    try:
        body = orjson.loads(content)
    except ValueError:
        body = content.decode(errors="replace") or reason
    return " ".join(error_message(body).split())


def _encoded(body: Mapping[str, Any], url: str) -> bytes:
    # Not the standard library's JSON: a long prompt's ids would hold up all other rollouts for
    # milliseconds, a hundred times as long.
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise InferenceError(f"{url} cannot be asked: the request is no JSON ({error})") from error


def _json(content: bytes, base_url: str) -> Any:
    try:
        return orjson.loads(content)
    except ValueError as error:
        raise InferenceError(f"{base_url} answered with something that is not JSON") from error


def _bearer(key: SecretStr | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
