"""Client of one inference server: SGLang's native HTTP API, which the embedded engine shares.

Input: requests as values. Output: results and errors as values of `wire` and `errors`. Independent
of policies, the store, and other servers. No other module uses these routes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from pydantic import SecretStr

from agentrl.config.sections import InferenceSection
from agentrl.errors import ServerLost, ServerRefused
from agentrl.inference.client.json_transport import JsonTransport, error_message
from agentrl.inference.wire import (
    GenerateRequest,
    GenerateResult,
    PauseMode,
    parse_partial,
    parse_prompt_logprobs,
    parse_result,
    policy_version,
    prompt_logprobs_body,
    request_body,
)
from agentrl.schema import ServerLoad

_OK, _UNAVAILABLE = 200, 503
OnPartial = Callable[[GenerateResult], None]
"""Stream callback: called every few tokens with everything sampled so far."""


@dataclass(frozen=True)
class ModelInfo:
    """A server's report on its model."""

    model_path: str
    weight_version: int
    """Policy version; a label that is not a number means version 0."""


class TensorList(Protocol):
    """The tensors that are broadcast, in order; a `Bucket`, without importing torch."""

    @property
    def names(self) -> Sequence[str]:
        """Names in the checkpoint."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Names of the dtypes without `torch.`, such as `bfloat16`."""

    @property
    def shapes(self) -> Sequence[Sequence[int]]:
        """Shapes."""


class SGLangClient:
    """Async context manager around one server's routes.

    Every failure is an `InferenceError` that names the address; responses with an error status are
    `ServerRefused`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: SecretStr | None = None,
        admin_key: SecretStr | None = None,
    ) -> None:
        """Prepare a client, inside a running event loop.

        Args:
            base_url: for example `http://127.0.0.1:30000`.
            api_key: bearer key of the data routes.
            admin_key: bearer key of the control routes; by default the API key.
        """
        self._transport = JsonTransport(base_url)
        self._data_headers = _bearer(api_key)
        self._control_headers = _bearer(admin_key or api_key)

    @classmethod
    def of(cls, base_url: str, inference: InferenceSection) -> Self:
        """Return a client of one of the run's servers, with the keys of its flags."""
        return cls(
            base_url,
            api_key=inference.inference_api_key,
            admin_key=inference.inference_admin_key,
        )

    @property
    def base_url(self) -> str:
        """The server's address, without a trailing slash."""
        return self._transport.base_url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._transport.close()

    async def generate(
        self, request: GenerateRequest, on_partial: OnPartial | None = None
    ) -> GenerateResult:
        """Sample a continuation; waits while the server is paused.

        Cancelling the call aborts the generation on the server.
        """
        response_context = self._transport.response(
            "POST",
            "/generate",
            request_body(request, stream=on_partial is not None),
            headers=self._data_headers,
            timeout_seconds=None,  # a paused server holds requests open
        )
        async with response_context as response:
            if on_partial is None:
                result = self._transport.decode(await self._transport.content(response))
                return parse_result(result, self.base_url, adapter=request.adapter)
            async for body in self._transport.frames(response):
                if "error" in body:
                    raise ServerRefused(
                        f"{self.base_url} aborted a generation: {error_message(body)}",
                        _error_status(body["error"]),
                    )
                if (body.get("meta_info") or {}).get("finish_reason") is not None:
                    return parse_result(body, self.base_url, adapter=request.adapter)
                on_partial(parse_partial(body, self.base_url, adapter=request.adapter))
        raise ServerLost(f"{self.base_url} closed a stream before its end")

    async def prompt_logprobs(self, input_ids: np.ndarray, start: int) -> np.ndarray:
        """Return the logprobs, at temperature 1, of the tokens of a prompt [P] after `start`."""
        response_context = self._transport.response(
            "POST",
            "/generate",
            prompt_logprobs_body(input_ids, start),
            headers=self._data_headers,
            timeout_seconds=None,
        )
        async with response_context as response:
            body = self._transport.decode(await self._transport.content(response))
        return parse_prompt_logprobs(body, input_ids[start + 1 :], self.base_url)

    # State of the server.

    async def health(self) -> bool:
        """Return whether the server is up and ready. Needs no key."""
        return await self._transport.status("/health") == _OK

    async def answers(self) -> bool:
        """Return whether the server responds at all. Needs no key."""
        return await self._transport.status("/health") is not None

    async def is_paused(self) -> bool:
        """Return whether the server reports that it accepts requests without processing them.

        Servers without that route count as running.
        """
        return await self._transport.status("/ready") == _UNAVAILABLE

    async def model_info(self) -> ModelInfo:
        """Return the server's report on its model."""
        info = await self._get("/model_info")
        return ModelInfo(
            model_path=str(info.get("model_path", "")),
            weight_version=policy_version(info.get("weight_version")),
        )

    async def server_info(self) -> Mapping[str, Any]:
        """Return the server's arguments and state."""
        return await self._get("/server_info")

    async def takes_priorities(self) -> bool:
        """Return whether the server computes requests of a higher priority first."""
        try:
            info = await self.server_info()
        except ServerRefused:  # it has no such route
            return False
        is_reversed = info.get("schedule_low_priority_values_first")
        return bool(info.get("enable_priority_scheduling")) and not is_reversed

    async def loads(self) -> ServerLoad:
        """Return how busy the server is, over all of its data-parallel workers."""
        ranks = (await self._get("/v1/loads?include=core")).get("loads") or []
        usages = [float(rank.get("token_usage") or 0.0) for rank in ranks]
        return ServerLoad(
            num_running=sum(int(rank.get("num_running_reqs") or 0) for rank in ranks),
            num_waiting=sum(int(rank.get("num_waiting_reqs") or 0) for rank in ranks),
            max_running=sum(int(rank.get("max_running_requests") or 0) for rank in ranks),
            num_used_tokens=sum(int(rank.get("num_used_tokens") or 0) for rank in ranks),
            token_usage=sum(usages) / len(usages) if usages else 0.0,
            tokens_per_second=sum(float(rank.get("gen_throughput") or 0.0) for rank in ranks),
        )

    # Control of generation. All requests from here on use the control key, except for `adapters`.

    async def pause(self, mode: PauseMode) -> None:
        """Pause all generations; the mode decides what happens to those in flight."""
        await self._control("/pause_generation", {"mode": mode})

    async def continue_(self) -> None:
        """Continue generations after a pause."""
        await self._control("/continue_generation", {})

    async def abort(self, rid: str | None = None) -> None:
        """Abort one generation, or all of them if no id is given."""
        await self._control("/abort_request", {"rid": rid} if rid else {"abort_all": True})

    async def flush_cache(self) -> None:
        """Forget all cached prefixes."""
        await self._control("/flush_cache", {})

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Have the server release memory, of `weights` or of the `kv_cache`.

        SGLang's scheduler crashes if generations are running: pause it and flush its cache first.
        """
        await self._control("/release_memory_occupation", {"tags": list(tags)})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Make the server reallocate released memory; its contents are lost.

        SGLang's scheduler crashes if the memory was not released.
        """
        await self._control("/resume_memory_occupation", {"tags": list(tags)})

    # Weights, from disk or over a process group. Servers before 0.5.20 or so have no
    # `/begin_weight_update` and `/end_weight_update`.

    async def update_weights_from_disk(
        self,
        path: str,
        *,
        weight_version: str,
        flush_cache: bool = True,
    ) -> None:
        """Load weights from a directory that the server can read."""
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

    async def update_weight_version(self, version: str) -> None:
        """Change the label of the weights, without changing the weights."""
        await self._control(
            "/update_weight_version", {"new_version": version, "abort_all_requests": False}
        )

    async def init_weights_update_group(
        self, *, host: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Have the server join a process group; return when all ranks have joined."""
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
        """Have the server leave a process group."""
        await self._control("/destroy_weights_update_group", {"group_name": name})

    async def begin_weight_update(self) -> None:
        """Open the session in which weights arrive over a process group."""
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
        """Receive some weights from the next broadcasts of a group, one broadcast for each tensor."""
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

    async def update_weights_from_tensor(
        self,
        handles: Sequence[str],
        *,
        weight_version: str | None = None,
        flush_cache: bool = False,
    ) -> None:
        """Copy some weights from the memory that handles describe."""
        await self._control(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(handles),
                "load_format": None,
                "weight_version": weight_version,
                "flush_cache": flush_cache,
                "abort_all_requests": False,
            },
        )

    # Adapters (LoRA), which the server holds alongside the model.

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a directory that the server can read; nothing is paused."""
        await self._control("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; return when the generations that use it have ended."""
        await self._control("/unload_lora_adapter", {"lora_name": name})

    async def adapters(self) -> tuple[str, ...]:
        """Return the names of the loaded adapters."""
        models = (await self._get("/v1/models")).get("data") or []
        return tuple(str(model["id"]) for model in models if model.get("parent") is not None)

    async def _control(self, path: str, body: Mapping[str, Any]) -> None:
        await self._transport.post(path, body, self._control_headers)

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._transport.get(path, self._data_headers)


def _error_status(error: object) -> int:
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if isinstance(code, int) else 500


def _bearer(key: SecretStr | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key.get_secret_value()}"}
