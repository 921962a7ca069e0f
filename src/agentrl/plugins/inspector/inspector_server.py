"""`agentrl ui`: serves the inspector until a signal arrives.

Input: the configuration of a command. Output: the printed address, with its access token.
"""

import logging
import os
import socket
from collections.abc import Callable
from urllib.parse import quote

from uvicorn.config import LOGGING_CONFIG

from agentrl.addresses import http_address, is_loopback
from agentrl.config.private_files import kept_key
from agentrl.config.sections import PRIVATE_MONGO_ROOT, RootConfig
from agentrl.errors import StoreError
from agentrl.plugins.inspector.example_run import ExampleTour
from agentrl.plugins.inspector.inspector_app import InspectorApp
from agentrl.plugins.inspector.reader_access import TOKEN_VARIABLE
from agentrl.plugins.inspector.run_sources import RunSources
from agentrl.runtime.http.http_servers import serve_until_signalled, server_config
from agentrl.runtime.ports import listening, listening_near

logger = logging.getLogger(__name__)

FIRST_PORT = 8480
TOKEN_FILE = "ui-token"
"""File with the token of the inspectors of a folder; it stays, so that links survive a restart."""
_CLOSE_SECONDS = 1


async def serve_inspector(
    config: RootConfig,
    *,
    host: str,
    port: int | None,
    allow_control: bool,
    version: str,
    when_ready: Callable[[str], None],
    tour: ExampleTour | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        config: the location of the runs; the page of the named run is opened first.
        host: address to listen on.
        port: port to listen on; a free one from 8480 on by default.
        allow_control: whether readers may change a run.
        version: AgentRL's.
        when_ready: called with the address once requests are answered.
        tour: the path through the example, if that is what is served.
    """
    with listening_near(host, FIRST_PORT) if port is None else listening(host, port) as listener:
        bound = listener.getsockname()[1]
        folder = PRIVATE_MONGO_ROOT.parent if tour is None else config.private_mongo_dir.parent
        token = os.environ.get(TOKEN_VARIABLE) or kept_key(folder / TOKEN_FILE)
        sources = RunSources(config)
        app = InspectorApp(
            sources,
            RunSources(config, may_write=True) if allow_control else None,
            version=version,
            tour=tour,
        )
        reachable = host if is_loopback(host) else socket.gethostname()
        is_named = "run_name" in config.run.model_fields_set
        page = f"/runs/{quote(config.run.run_name)}" if is_named else "/"
        if is_named:
            await _warn_if_missing(sources, config.run.run_name)
        server = server_config(
            app.asgi(token=token, host=host),
            grace_seconds=_CLOSE_SECONDS,
            lifespan="on",
            log_config=LOGGING_CONFIG,
        )
        address = f"{http_address(reachable, bound)}{page}?token={quote(token)}"
        await serve_until_signalled(server, listener, lambda: when_ready(address))


async def _warn_if_missing(sources: RunSources, name: str) -> None:
    try:
        names = await sources.names()
    except StoreError as error:
        logger.warning("%s; the page shows the run once the database responds", error)
    else:
        if name not in names:
            logger.warning(
                "%s contains no run %s; the page shows it once it exists", sources.place, name
            )
