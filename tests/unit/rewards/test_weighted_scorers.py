"""Scorers named as weighted sums of others."""

import pytest

from agentrl.errors import ConfigError, ScoringError
from agentrl.rewards import GroundTruth, MCPScorerFactory, Verdict
from agentrl.rewards.factory import weighted_terms

TRUTH = GroundTruth(query="q", answer="the desk lamp")


@MCPScorerFactory.register_scorer("brief", version="3")
def brief(answer: str, truth: GroundTruth) -> Verdict:
    return Verdict(float(len(answer) < 20), detail="counted", parts={"letters": len(answer)})


@MCPScorerFactory.register_scorer("outage")
async def outage(answer: str, truth: GroundTruth) -> float:
    raise ScoringError("the reward model is away")


@MCPScorerFactory.register_scorer("grouped", sees_group=True)
def grouped(records: object, truth: GroundTruth) -> list[float]:
    return []


async def test_a_weighted_sum_keeps_each_scorer_as_a_part() -> None:
    scorer = MCPScorerFactory.get_scorer("exact + 0.5*similarity + -0.25*brief")
    score = await scorer.score("desk lamp lamp", TRUTH)
    similarity = 3 / 15**0.5
    assert score.value == pytest.approx(0.5 * similarity - 0.25)
    expected = {"exact": 0.0, "similarity": similarity, "brief": 1.0, "brief letters": 14.0}
    assert score.parts == pytest.approx(expected)
    assert score.scorer == "exact + 0.5*similarity + -0.25*brief"
    assert (score.version, score.detail) == ("1, 1, 3", "counted")
    assert (await scorer.score(None, TRUTH)).value == 0.0


async def test_a_scorer_that_cannot_decide_leaves_the_sum_without_a_score() -> None:
    with pytest.raises(ScoringError, match="the reward model is away"):
        await MCPScorerFactory.get_scorer("exact+outage").score("x", TRUTH)


def test_what_one_scorer_needs_the_sum_needs() -> None:
    MCPScorerFactory.check_question("2*brief", ())
    with pytest.raises(ConfigError, match="needs a reference answer"):
        MCPScorerFactory.check_question("brief + exact", ())
    with pytest.raises(ConfigError, match="compares text"):
        MCPScorerFactory.check_question("brief + exact", ([1],))
    with pytest.raises(ConfigError, match="give --agent_config_path"):
        MCPScorerFactory.get_scorer("brief + agentcpm").check(None)
    MCPScorerFactory.get_scorer("brief + exact").check(None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact + 0.5*exat", "unknown scorer 'exat'; did you mean 'exact'"),
        ("exact + exact", "'exact' occurs twice; leave it out"),
        ("exact + 2*grouped", "'grouped' scores groups; leave it out"),
        ("exact + ", "unknown scorer 'exact \\+ '"),
        ("half*exact", "unknown scorer 'half\\*exact'"),
    ],
)
def test_what_is_no_sum_of_scorers_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MCPScorerFactory.get_scorer(name)


def test_terms_are_read_with_and_without_weights() -> None:
    assert weighted_terms("a+.5 * b + -2*my-scorer") == [(1, "a"), (0.5, "b"), (-2, "my-scorer")]
    assert weighted_terms("exact") == []


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("The DESK lamp!", 1.0),
        ("lamp", 3**-0.5),
        ("", 0.0),
        ("sofa", 0.0),
        ("台灯", 0.5),
    ],
)
async def test_similarity_is_the_cosine_of_the_words(answer: str, value: float) -> None:
    truth = GroundTruth(query="q", answer="the desk lamp", aug_answers=("灯光",))
    scorer = MCPScorerFactory.get_scorer("similarity")
    assert (await scorer.score(answer, truth)).value == pytest.approx(value)
