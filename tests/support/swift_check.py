"""Runs where ms-swift is installed: plays one rollout of a run's scheduler, without a GPU.

`python swift_check.py RUN_FOLDER` prints what ms-swift would train as one line of JSON. The engine is
ms-swift's own with transformers, where `swift rollout` would use vLLM.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
import yaml
from pydantic import BaseModel
from swift.infer_engine import RequestConfig, TransformersEngine
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rollout import multi_turns


def main() -> None:
    """Play the first question, and have the reward function judge it."""
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(folder))
    settings = yaml.safe_load((folder / "rollout.yaml").read_text())
    __import__(Path(settings["external_plugins"]).stem)
    from swift.rewards import orms  # noqa: PLC0415  # with what the plugin registered

    engine = TransformersEngine(
        settings["model"],
        model_type=settings["model_type"],
        template_type=settings["template"],
        torch_dtype=torch.float32,
    )
    calls = []
    sample = engine.infer_async

    async def recorded(request: RolloutInferRequest, *words: object, **named: object) -> object:
        response = await sample(request, *words, **named)
        calls.append(list(response.choices[0].token_ids))
        return response

    engine.infer_async = recorded
    row = json.loads((folder / "train_data.jsonl").read_text().splitlines()[0])
    request = RolloutInferRequest(messages=row.pop("messages"), data_dict=row)
    config = RequestConfig(max_tokens=48, temperature=0, return_details=True, logprobs=True)

    async def play() -> tuple[object, list[float]]:
        scheduler = multi_turns[settings["multi_turn_scheduler"]](infer_engine=engine)
        output = await scheduler.run(request, config)
        completion = output.messages[-1]["content"]
        rewards = await orms["agentrl"]()(
            [completion], [row["agentrl_row"]], [output.rollout_infos]
        )
        return output, rewards

    output, rewards = asyncio.run(play())
    assert isinstance(output, BaseModel)
    found = output.model_dump(exclude={"response"})
    sys.stdout.write(json.dumps({**found, "calls": calls, "rewards": rewards}) + "\n")
    sys.stdout.flush()
    os._exit(0)


main()
