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
from agentrl.runtime.logs import setup_logging
from agentrl.runtime.processes.memory import frozen_imports

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
    for name, field in EngineConfig.model_fields.items():
        if name not in ("api_key", "admin_api_key", "weight_roots"):
            flag = f"--{name.replace('_', '-')}"
            shown = f" ({field.default})" if isinstance(field.default, int | str) else ""
            help_text = f"{field.description}{shown}"
            parser.add_argument(flag, required=field.is_required(), help=help_text)
    roots = EngineConfig.model_fields["weight_roots"].description
    parser.add_argument("--weight-root", action="append", dest="weight_roots", help=roots)
    return parser


if __name__ == "__main__":
    sys.exit(main())
