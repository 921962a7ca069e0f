"""The scorers that come with AgentRL: `exact`, `em`, `math` and `agentcpm` (alias `asearcher`)."""

import re
import string
import unicodedata

from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.rewards.judge import judge
from agentrl.rewards.math_pool import MathPool
from agentrl.rewards.truth import GroundTruth

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_math_pool = MathPool()


@MCPScorerFactory.register_scorer("exact", needs_answer=True)
async def exact(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is a right one, character by character, outer space aside."""
    given = answer.strip()
    return Verdict(float(any(given == right.strip() for right in truth.accepted)))


@MCPScorerFactory.register_scorer("em", needs_answer=True)
async def exact_match(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is a right one, case, punctuation, articles and spacing aside."""
    given = normalise(answer)
    correct = any(given == normalise(right) for right in truth.accepted)
    return Verdict(float(correct), detail=given)


@MCPScorerFactory.register_scorer("math", needs_answer=True)
async def math(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is mathematically equal to a right one (math-verify)."""
    given = answer.strip()
    if any(given == right.strip() for right in truth.accepted):
        return Verdict(1.0)
    return await _math_pool.compare(given, truth.accepted)


for _name in ("agentcpm", "asearcher"):
    MCPScorerFactory.register_scorer(_name, judge, needs_judge=True, needs_answer=True)


def normalise(text: str) -> str:
    """Return text in lower case without punctuation, articles and superfluous space."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())
