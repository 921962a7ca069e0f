"""`agentrl serve`."""

import asyncio
from collections.abc import Sequence

from agentrl.cli.uri import store_uri
from agentrl.config.loading import parse_flags


def main(argv: Sequence[str]) -> int:
    """Keep an inference server."""
    config = parse_flags(argv)
    uri = store_uri(config)
    from agentrl.inference.supervisor.server_supervisor import run_server
    from agentrl.runtime.logs import setup_logging

    setup_logging("serve")
    asyncio.run(run_server(config, uri))
    return 0
