"""A scorer that takes its time, so that kills meet scorings."""

import asyncio

from agentrl.rewards import GroundTruth, MCPScorerFactory

SECONDS = 0.3


@MCPScorerFactory.register_scorer("slow_exact")
async def slow_exact(answer: str, truth: GroundTruth) -> float:
    await asyncio.sleep(SECONDS)
    return float(answer.strip() == str(truth.answer))
