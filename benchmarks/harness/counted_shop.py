"""The shop's tool server, which adds a byte to a file for every call.

python benchmarks/harness/counted_shop.py FILE --port 8765
"""

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.shop import server

CALL = server.call_tool
COUNT = Path(sys.argv.pop(1)).open("ab", buffering=0)  # noqa: SIM115 - open as long as the server


def counted_call(catalogue: server.Catalogue, name: str, arguments: Mapping[str, object]) -> str:
    """Count a call, and make it."""
    COUNT.write(b".")
    return CALL(catalogue, name, arguments)


if __name__ == "__main__":
    server.call_tool = counted_call
    server.main()
