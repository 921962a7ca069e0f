"""`python -m agentrl.plugins.engine --model-path DIR --port 30000`.

Keys are read from the environment (`AGENTRL_API_KEY`, `AGENTRL_ADMIN_KEY`), where other users of
the machine cannot see them.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from agentrl.errors import ConfigError
from agentrl.plugins.engine.engine_config import EngineConfig
from agentrl.runtime.frozen_imports import frozen_imports
from agentrl.runtime.logs import setup_logging

with frozen_imports():
    from agentrl.plugins.engine.http.engine_server import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve; returns the exit status."""
    setup_logging("engine")
    values = vars(_parser().parse_args(argv))
    values = {name: value for name, value in values.items() if value is not None}
    values["api_key"] = os.environ.get("AGENTRL_API_KEY") or None
    values["admin_api_key"] = os.environ.get("AGENTRL_ADMIN_KEY") or None
    try:
        return serve(EngineConfig(**values))
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-")
        sys.stderr.write(f"agentrl engine: --{flag}: {first['msg']}\n")
    except ConfigError as error:
        sys.stderr.write(f"agentrl engine: {error}\n")
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m agentrl.plugins.engine")
    parser.add_argument("--model-path", required=True, help="Hugging Face directory")
    parser.add_argument("--host", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, help="port, 0 for a free one (30000)")
    parser.add_argument("--device", help="cpu or cuda (a GPU if one is visible)")
    parser.add_argument(
        "--dtype", help="float32, bfloat16 or float64 (bfloat16 on a GPU, else float32)"
    )
    parser.add_argument("--weight-version", help="initial label of the weights (0)")
    parser.add_argument("--max-running-requests", type=int, help="sequences decoded at once (64)")
    parser.add_argument("--max-queued-requests", type=int, help="requests that may be queued")
    parser.add_argument("--context-length", type=int, help="longest sequence (the model's limit)")
    parser.add_argument("--prefill-tokens-per-step", type=int, help="prompt tokens per step (1024)")
    parser.add_argument("--kv-cache-bytes", type=int, help="memory for running sequences")
    parser.add_argument("--prefix-cache-bytes", type=int, help="memory for cached prefixes")
    parser.add_argument("--num-threads", type=int, help="CPU threads of torch")
    parser.add_argument(
        "--log-requests", help="file to which every request's token ids are written"
    )
    parser.add_argument(
        "--weight-root",
        action="append",
        dest="weight_roots",
        help="directory below which new weights may lie; repeatable (any)",
    )
    parser.add_argument("--seed", type=int, help="seed of requests without their own (0)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
