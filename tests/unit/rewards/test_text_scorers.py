import json

import pytest

from agentrl.rewards import GroundTruth, MCPScorerFactory, gaia_reward_func


async def value(answer: str | None, *accepted: object, scorer: str = "gaia") -> float:
    truth = GroundTruth(query="q", answer=accepted[0], aug_answers=tuple(accepted[1:]))
    return (await MCPScorerFactory.get_scorer(scorer).score(answer, truth)).value


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        (" 21\n", ("21",), 1.0),
        ("21", (21,), 1.0),
        ("21.0", (21,), 0.0),
        ("0", (0,), 1.0),
        ("false", (False,), 1.0),
        ("Paris", ("paris",), 0.0),
        ("NYC", ("New York", "NYC"), 1.0),
        ("", ("",), 1.0),
    ],
)
async def test_exact_compares_characters(
    answer: str, accepted: tuple[object, ...], expected: float
) -> None:
    assert await value(answer, *accepted, scorer="exact") == expected


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("The  Eiffel-Tower!", "eiffeltower", 1.0),
        ("a lamp", "LAMP", 1.0),
        ("lamp", "lamps", 0.0),
        ("\uff21\uff22\uff23", "abc", 1.0),
        # as in SQuAD
        ("The U.S.", "us", 1.0),
        ("Saint-Denis", "saintdenis", 1.0),
        ("the 1,000 islands.", "1000 islands", 1.0),
        ("COVID-19", "covid19", 1.0),
        ("rock 'n' roll", "rock n roll", 1.0),
        ("$5", "5", 1.0),
        ("50%", "50", 1.0),
        ("No. 5", "No 5", 1.0),
        ("**Paris**", "Paris", 1.0),
        ("Dr. Who!", "dr who", 1.0),
        # signs, points and what else stands in a number
        ("-5", "5", 0.0),
        ("\N{MINUS SIGN}5", "-5", 1.0),
        ("-$5", "$5", 0.0),
        ("1.5", "15", 0.0),
        (".5", "5", 0.0),
        ("1,5", "15", 0.0),
        ("10:30", "1030", 0.0),
        ("1/2", "12", 0.0),
        ("2-1", "21", 0.0),
        ("1,234,567", "1234567", 1.0),
        ("1.5.", "1.5", 1.0),
        # names with signs, and signs alone
        ("C++", "C#", 0.0),
        ("C++", "C", 0.0),
        ("c++.", "C++", 1.0),
        ("O-", "O+", 0.0),
        ("AB-", "AB", 0.0),
        (">", "<", 0.0),
        (">", ">", 1.0),
        ("x < 5", "x > 5", 0.0),
        ("A", ">", 0.0),
        ("A", "the", 0.0),
        ("a", "A", 1.0),
        ("!", "?", 0.0),
        ("", "!", 0.0),
    ],
)
async def test_em_compares_normalised_text(answer: str, right: str, expected: float) -> None:
    assert await value(answer, right, scorer="em") == expected


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("$1,234.50", "1234.5", 1.0),
        ("17%", "17", 1.0),
        ("1.7e1", "17", 1.0),
        ("about 17", "17", 0.0),
        ("", "17", 0.0),
        ("0", 0, 1.0),
        ("no", 0, 0.0),
    ],
)
async def test_gaia_numbers_are_compared_as_numbers(
    answer: str, right: object, expected: float
) -> None:
    assert await value(answer, right) == expected


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("Egg, milk", "egg,Milk", 1.0),
        ("egg; milk", "egg, milk", 1.0),
        ("milk, egg", "egg, milk", 0.0),
        ("egg", "egg, milk", 0.0),
        ("egg, milk, salt", "egg, milk", 0.0),
        ("$1, 2%", "1; 2", 1.0),
        ("St Paul, 3", "St. Paul, 3", 0.0),
        ("s t. paul, 3", "St. Paul, 3", 1.0),
    ],
)
async def test_lists_are_compared_element_by_element(
    answer: str, right: str, expected: float
) -> None:
    assert await value(answer, right) == expected


@pytest.mark.parametrize(
    ("answer", "right", "expected"),
    [
        ("the  sea gull!", "The seagull", 1.0),
        ("sea-gull", "Sea gull", 1.0),
        ("a seagull", "seagull", 0.0),
        ("true", True, 1.0),
        ("", "!", 0.0),
        ("!", "!", 1.0),
        ("15 m", "1.5 m", 0.0),
        ("C#", "C++", 0.0),
        ("1_0", "10", 0.0),
        ("10", "1_0", 0.0),
        ("1_0", "1_0", 1.0),
    ],
)
async def test_text_is_compared_without_space_case_and_punctuation(
    answer: str, right: object, expected: float
) -> None:
    assert await value(answer, right) == expected


async def test_the_traps_of_the_rules_are_as_documented() -> None:
    # A reference with a comma is a list, even where it is meant as a number.
    assert await value("1000", "1,000") == 0.0
    assert await value("1,000", "1,000") == 1.0
    assert await value("1;0", "1,000") == 1.0
    # A unit makes it a text.
    assert await value("17", "17 m") == 0.0
    assert await value("17m", "17 m") == 1.0
    # No number is not infinity, and a name is not a number.
    assert await value("no idea", "inf") == 0.0
    assert await value("Infinity", "inf") == 1.0
    assert await value("nan", "Nan") == 1.0
    # A missing answer is not the word None.
    assert await value(None, "None") == 0.0
    assert await value("none", "None") == 1.0


@pytest.mark.parametrize(
    ("answer", "accepted", "expected"),
    [
        ("b", ("B", "Paris"), 1.0),
        ("(B) Paris", ("B", "Paris"), 1.0),
        ("Paris.", ("B", "Paris"), 1.0),
        ("A. Paris", ("B", "Paris"), 0.0),
        ("A dog", ("B", "dog"), 1.0),
        ("C. elegans", ("B", "C. elegans"), 1.0),
        ("5", ("B", "5"), 1.0),
        ("-5", ("B", "5"), 0.0),
        ("15", ("B", "1.5"), 0.0),
        ("!", ("B", "The"), 0.0),
        ("(A) or (B)", ("A", "Paris"), 0.0),
        ("(1)", ("1", "Paris"), 1.0),
        ("\\text{B}", ("B", "Paris"), 1.0),
        ("\\textbf{(B)} Paris", ("B", "Paris"), 1.0),
        ("\\text{A}", ("B", "Paris"), 0.0),
        ("**B**", ("B", "Paris"), 1.0),
        ("**B.** Paris", ("B", "Paris"), 1.0),
        ("**A** **B**", ("A", "Paris"), 0.0),
        ("**Paris**", ("B", "Paris"), 1.0),
        ("Option B", ("B", "Paris"), 1.0),
        ("Option (b): Paris", ("B", "Paris"), 1.0),
        ("Option A or B", ("A", "Paris"), 0.0),
        ("Option B", ("A", "Option B"), 1.0),
        ("Option pricing", ("P", "Paris"), 0.0),
        ("B - Paris", ("B", "Paris"), 1.0),
        ("B \u2013 Paris", ("B", "Paris"), 1.0),
        ("A - B", ("A", "Paris"), 0.0),
        ("$B$", ("B", "Paris"), 1.0),
        ("\\(B\\)", ("B", "Paris"), 1.0),
        ("2*3*4", ("B", "234"), 0.0),
    ],
)
async def test_choice_takes_the_letter_or_the_text(
    answer: str, accepted: tuple[str, ...], expected: float
) -> None:
    assert await value(answer, *accepted, scorer="choice") == expected


@pytest.mark.parametrize(
    ("cities", "expected"),
    [("AA", 1.0), ("AB", 0.0), ("BA", 0.0), ("A", 0.0), ("AAA", 0.0)],
)
async def test_a_call_that_is_wanted_twice_is_made_twice(cities: str, expected: float) -> None:
    given = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    wanted = {"name": "weather", "arguments": {"city": "A"}}
    assert await value(json.dumps(given), [wanted, wanted], scorer="calls") == expected


async def test_further_right_answers_count() -> None:
    assert await value("NYC", "New York", "NYC") == 1.0


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        ("It is <answer> 17 </answer>.", 17, 1.0),
        ("<answer>17</answer> or <answer>18</answer>", "18", 0.0),
        ("<answer>two\nlines</answer>", "Two lines", 1.0),
        ("<answer>$1,000%</answer>", "1000", 1.0),
        ("<answer>a; B</answer>", "a, b", 1.0),
        ("<answer>None</answer>", None, 1.0),
        ("17", "17", 0.0),
        ("<answer>nothing of the kind</answer>", "inf", 0.0),
    ],
)
def test_the_reward_function_for_whole_agents_takes_the_first_answer(
    solution: str, truth: str | float | None, reward: float
) -> None:
    assert gaia_reward_func("gaia", solution, truth, {"level": 1}) == reward
