"""Pairs of answers, with what is decided and why."""

import pytest

from agentrl.rewards.math_equality import is_equal

# right answer, given answer, whether they are equal, why
PAIRS = [
    # exact numbers: no rounding
    ("1/2004!", "1/2006!", False, "both are exact"),
    ("1/2004!", "1/2004!", True, "the same"),
    ("1/2^{99}", "1/2^{98}", False, "both are exact"),
    ("2^{-99}", "\\frac{1}{2^{99}}", True, "the same power"),
    (
        "\\frac{2^{2005}+1}{3\\cdot 2^{2006}}",
        "\\frac{1}{3\\cdot 2^{2006}}",
        False,
        "both are exact",
    ),
    ("\\frac{1}{3}", "\\frac{2}{6}", True, "a fraction that is not reduced"),
    ("\\frac{1}{3}", "\\frac{333333333}{1000000000}", False, "both are exact"),
    ("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}", True, "the same radical"),
    ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}", True, "a nested radical"),
    ("10^{-12}", "10^{-13}", False, "both are exact"),
    ("\\pi", "\\frac{22}{7}", False, "both are exact"),
    ("2^{10}", "1024", True, "the value of a power"),
    ("5!", "120", True, "the value of a factorial"),
    ("\\binom{5}{2}", "10", True, "the value of a binomial"),
    ("\\log_2 8", "3", True, "the value of a logarithm"),
    ("-3", "3", False, "the sign"),
    ("0", "10^{-30}", False, "small is not zero"),
    # decimals: six significant digits
    ("0.5", "\\frac{1}{2}", True, "a decimal of the same value"),
    ("0.000000001", "0.000000002", False, "relative, not absolute"),
    ("1e-9", "0.000000001", True, "scientific notation"),
    ("0.333", "\\frac{1}{3}", False, "three digits"),
    ("3.14", "\\pi", False, "three digits"),
    ("1234567.8", "1234567.9", True, "six significant digits agree"),
    ("0.1", "0.2", False, "another number"),
    # units and currency
    ("100", "100 USD", True, "the reference names no unit"),
    ("100", "100 meters", True, "the reference names no unit"),
    ("100", "100 km/h", True, "the reference names no unit"),
    ("100", "99 meters", False, "another number"),
    ("100", "\\$100", True, "currency"),
    ("12", "12\\text{ cm}", True, "the reference names no unit"),
    ("100", "1e2", True, "scientific notation of a whole number"),
    ("6.02 \\cdot 10^{23}", "6.02e23", True, "scientific notation"),
    # percent
    ("50\\%", "50\\%", True, "the same"),
    ("50\\%", "0.5", True, "a percentage is a number"),
    ("50\\%", "5\\%", False, "another percentage"),
    # mixed numbers, thousands, degrees
    ("1,000,000", "1000000", True, "thousands separators"),
    ("90^\\circ", "90", True, "degrees"),
    # symbols
    ("\\sqrt{\\frac{1}{n}}", "\\frac{1}{\\sqrt{n}}", True, "equal for positive symbols"),
    ("\\sqrt{n}", "n", False, "another function"),
    ("x^2-1", "(x-1)(x+1)", True, "factored"),
    ("x+1", "x+2", False, "another expression"),
    ("n", "m", False, "another symbol"),
    # sets, tuples, intervals, matrices
    ("\\{1,2\\}", "\\{2,1\\}", True, "sets have no order"),
    ("(1,2)", "(2,1)", False, "points have one"),
    ("\\{1,2\\}", "\\{1,3\\}", False, "another element"),
    ("(0, 2^{-99})", "(0, 2^{-98})", False, "elements are compared exactly"),
    ("[0,1]", "[0,1)", False, "the end belongs to it"),
]


@pytest.mark.parametrize(("right", "answer", "equal", "why"), PAIRS)
def test_answers_are_equal_if_they_are_the_same_number_or_expression(
    right: str, answer: str, equal: bool, why: str
) -> None:
    assert is_equal(right, answer) is equal, why
