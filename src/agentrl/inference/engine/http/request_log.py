"""A record of what the engine was asked and what it sampled, for comparing with what is stored."""

import json
from pathlib import Path

from agentrl.inference.engine.generation.sequence import Sequence


class RequestLog:
    """Appends a JSON line for every sequence that ended."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a line is whole or absent when the engine is killed.
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, sequence: Sequence) -> None:
        """Note the prompt as it came in, and the ids sampled."""
        line = {
            "rid": sequence.rid,
            "input_ids": sequence.tokens[: sequence.num_prompt].tolist(),
            "output_ids": list(sequence.output_ids),
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
