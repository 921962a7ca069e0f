"""Starts an engine and serves it until a signal stops it."""

import logging
import signal
import socket
import sys

import torch
import uvicorn
import uvloop

from agentrl.addresses import is_loopback
from agentrl.errors import ConfigError
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.plugins.engine.generation.model_runner import load_model
from agentrl.plugins.engine.http.frontend import FrontEnd
from agentrl.plugins.engine.http.http_routes import make_app
from agentrl.runtime.http.http_servers import server_config
from agentrl.runtime.ports import listening

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_KEEP_ALIVE_SECONDS = 5
_GRACE_SECONDS = 2
# The engine's thread must regain the interpreter lock after every operation. With Python's default
# of 5 ms, a burst of requests would delay each operation by 5 ms.
_SWITCH_SECONDS = 0.0005
# For smaller models, synchronization of threads costs more than the threads gain, and many times
# more on a machine whose cores are busy.
_TINY_MODEL_PARAMETERS = 8_000_000


def serve(config: EngineConfig) -> int:
    """Serve until SIGINT or SIGTERM.

    Returns the exit status: 0 after a signal, 1 if the engine failed.
    """
    if config.api_key is None and not is_loopback(config.host):
        raise ConfigError(
            f"--host {config.host} is reachable from outside; set AGENTRL_API_KEY and "
            "AGENTRL_ADMIN_KEY, or listen on 127.0.0.1"
        )
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    sys.setswitchinterval(_SWITCH_SECONDS)
    listener = listening(config.host, config.port, backlog=_BACKLOG)
    try:
        model = load_model(config.model_path, *placement(config))
        if config.num_threads is None and model.num_parameters() < _TINY_MODEL_PARAMETERS:
            config = config.model_copy(update={"num_threads": 1})
        logger.info(
            "the weights take %.2f GB; running sequences take up to %.2f GB as they grow "
            "(--kv-cache-bytes), cached prefixes up to %.2f GB (--prefix-cache-bytes)",
            model.num_parameters() * model.dtype.itemsize / 1e9,
            config.kv_cache_bytes / 1e9,
            config.prefix_cache_bytes / 1e9,
        )
        return uvloop.run(_serve(FrontEnd(config, model), listener))
    finally:
        listener.close()


def placement(config: EngineConfig) -> tuple[torch.dtype, str]:
    """Return the precision of the model, and its device."""
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: torch sees no GPU; remove the flag to run on the CPU")
    device = config.device or ("cuda" if has_gpu else "cpu")
    dtype: torch.dtype = getattr(
        torch, config.dtype or ("bfloat16" if device == "cuda" else "float32")
    )
    return dtype, device


async def _serve(front_end: FrontEnd, listener: socket.socket) -> int:
    app = make_app(front_end)
    server = _UvicornServer(
        server_config(
            app,
            grace_seconds=_GRACE_SECONDS,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        ),
        front_end,
    )

    def on_death() -> None:
        server.should_exit = True

    front_end.start(on_death)
    host, port = listener.getsockname()[:2]
    logger.info(
        "serving %s (version %s) on http://%s:%d",
        front_end.model_path,
        front_end.weight_version,
        host,
        port,
    )
    # uvicorn stops on these signals and then raises them again. Handlers keep the exit status 0.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore_signal)
    try:
        await server.serve(sockets=[listener])
    finally:
        front_end.stop()
    return 1 if front_end.is_dead else 0


class _UvicornServer(uvicorn.Server):
    """Closes the front end at the start of a shutdown instead of waiting for generations."""

    def __init__(self, config: uvicorn.Config, front_end: FrontEnd) -> None:
        super().__init__(config)
        self._front_end = front_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._front_end.close()
        await super().shutdown(sockets)


def _ignore_signal(_number: int, _frame: object) -> None:
    pass
