"""The rehearsal process, which answers the requests of `rehearsed_rank`.

Planning commands start `python -m agentrl.plugins.planner.rehearsal.rehearsal_process` instead of importing
torch. It should see no GPU (`CUDA_VISIBLE_DEVICES=`), since it simulates one.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.config.sections import AlgorithmSection, ModelSection, TrainerSection
from agentrl.errors import ConfigError
from agentrl.runtime.printable import one_line
from agentrl.runtime.processes.request_server import Answer, RequestServer
from agentrl.runtime.telemetry.loop_watch import LoopWatch

_MAX_PROBLEM_CHARS = 500


def _load() -> Answer:
    """Import torch; whatever it prints is not taken for a reply."""
    try:
        from agentrl.plugins.planner.rehearsal.rehearsal import rehearse_run  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"{type(error).__name__}: {error}") from None

    def rehearsed(request: Mapping[str, Any]) -> dict[str, Any]:
        """Rehearse the step of a request."""
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
        except Exception as error:  # noqa: BLE001 - modeling code may raise anything
            text = one_line(f"{type(error).__name__}: {error}", _MAX_PROBLEM_CHARS)
            return {"problem": f"cannot rehearse a step of this model: {text}"}
        return {**asdict(memory), "activations": memory.activations, "peak": memory.peak}

    async def answer(request: Mapping[str, Any]) -> dict[str, Any]:
        return await asyncio.to_thread(rehearsed, request)

    return answer


if __name__ == "__main__":
    RequestServer(LoopWatch("the rehearsals' event loop", "rehearse in a thread")).run(_load)
