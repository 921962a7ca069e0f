"""The scorer of this project: questions.jsonl names it, and `scorer_module` in config.yaml this file."""

from agentrl.rewards import GroundTruth, MCPScorerFactory


@MCPScorerFactory.register_scorer("close", version="1")
def close(answer: str, truth: GroundTruth) -> float:
    """Return 1 for the correct number, 0.5 for one that is at most 5 away, and 0 otherwise."""
    try:
        distance = abs(float(answer) - float(truth.answer))
    except ValueError:  # the answer is not a number
        return 0.0
    if distance == 0:
        return 1.0
    return 0.5 if distance <= 5 else 0.0
