"""The rehearsal process: one request per line on stdin, one answer per line on stdout.

Planning commands start `python -m agentrl.plugins.planner.rehearsal.rehearsal_process` instead of importing
torch. It should see no GPU (`CUDA_VISIBLE_DEVICES=`), since it simulates one.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.errors import ConfigError
from agentrl.plugins.planner.rehearsal.rehearsal import rehearse_run


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Rehearse the step of a request.

    Args:
        request: sections `model`, `trainer` and `algorithm`, and the other arguments of
            `rehearse_run`.
    """
    try:
        memory = rehearse_run(
            ModelSection.model_validate(request["model"]),
            TrainerSection.model_validate(request["trainer"]),
            AlgorithmSection.model_validate(request["algorithm"]),
            model_path=Path(request["model_path"]),
            longest=request["longest"],
            device=request["device"],
        )
    except ConfigError as error:
        return {"problem": str(error)}
    return {**asdict(memory), "activations": memory.activations, "peak": memory.peak}


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line))) + "\n")
        sys.stdout.flush()
