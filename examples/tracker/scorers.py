"""The scorer of the tracker's questions: what the tracker holds at the end, and the answer."""

import json

from agentrl.rewards import GroundTruth, MCPScorerFactory, Rollout, Verdict


@MCPScorerFactory.register_scorer("tracker")
async def tracker(answer: str | None, truth: GroundTruth, rollout: Rollout) -> Verdict:
    """The share of the issues that are as they should be, less if others changed.

    A question that changes nothing is scored by its answer.
    """
    ended = json.loads((await rollout.call("export")).content)
    before, after = truth.columns["before"], truth.columns["after"]
    wanted = [number for number in after if after[number] != before.get(number)]
    done = [number for number in wanted if ended.get(number) == after[number]]
    damaged = [
        number
        for number in {*before, *ended} - {*wanted}
        if ended.get(number) != before.get(number)
    ]
    if wanted:
        right = len(done) / len(wanted)
    else:
        right = float(answer is not None and answer.strip() == truth.answer)
    detail = f"done: {done} of {wanted}; damaged: {sorted(damaged)}"
    return Verdict(right / (1 + len(damaged)), detail=detail, parts={"damaged": len(damaged)})
