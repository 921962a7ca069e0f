"""Whether two mathematical answers are equal: math-verify's reading, with exact numbers compared exactly.

math-verify rounds numbers to six decimals before it compares them, so any two small numbers are equal
to it (1/2^99 and 1/2^98). Here numbers without a decimal point must be equal, and others must agree to
six significant digits.
"""

import re
from collections.abc import Sequence
from typing import Any

import sympy
from math_verify import parse, verify

RELATIVE_TOLERANCE = 1e-6
"""Largest difference of two numbers of which one is a decimal, relative to the larger."""
_DIGITS = 40
"""Digits to which exact numbers are computed where their difference does not simplify to 0."""
_UNIT = re.compile(
    r"(?P<number>.*\d[\s})]*?)\s*(?:\\text\{)?\s*(?P<unit>[A-Za-z]{2,}(?:[ /][A-Za-z]+)*)\.?\}?"
)
_EXPONENT = re.compile(r"(?<![\w^])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})\b")
_DECIMAL = re.compile(r"\d?\.\d")
_CURRENCY = re.compile(r"\\\$(?=\s*[\d.])")
_COLLECTIONS = (sympy.Tuple, sympy.FiniteSet, sympy.Interval, sympy.MatrixBase)


def is_equal(right: str, answer: str) -> bool:
    """Return whether an answer equals the right one.

    Args:
        right: the reference.
        answer: the answer; text of a unit after its number is ignored if the reference has none.
    """
    # math-verify reads decimals as fractions, so whether a number is exact shows in its text alone.
    tolerance = RELATIVE_TOLERANCE if _DECIMAL.search(f"{right} {answer}") else 0.0
    if _is_equal(_parsed(right), _parsed(answer), tolerance):
        return True
    unit = _UNIT.fullmatch(answer.strip())
    if unit is None or _UNIT.fullmatch(right.strip()):
        return False
    return _is_equal(_parsed(right), _parsed(unit["number"]), tolerance)


def _is_equal(right: list[Any], answer: list[Any], tolerance: float) -> bool:
    if not right or not answer:
        return False
    one, other = _value(right), _value(answer)
    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        is_same = bool(verify(right, answer, timeout_seconds=None))
        return is_same and (one is None or other is None or _agree(one, other, tolerance))
    if one.is_number and other.is_number:
        return _same_number(one, other, tolerance)
    return bool(verify(right, answer, timeout_seconds=None)) or _equal_for_positive_symbols(
        one, other
    )


def _parsed(text: str) -> list[Any]:
    text = _CURRENCY.sub("", _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text))
    # math-verify recognizes bare LaTeX only inside an environment.
    wrapped = text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"
    found: list[Any] = parse(wrapped, parsing_timeout=None) or parse(text, parsing_timeout=None)
    return found


def _value(parsed: Sequence[Any]) -> Any | None:
    """Return the parsed expression; None if only text was found."""
    return next((one for one in parsed if isinstance(one, (sympy.Basic, sympy.MatrixBase))), None)


def _agree(one: Any, other: Any, tolerance: float) -> bool:
    """Return whether values that math-verify calls equal are equal number by number."""
    if isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr):
        are_numbers = one.is_number and other.is_number
        return not are_numbers or _same_number(one, other, tolerance)
    if isinstance(one, _COLLECTIONS) and isinstance(other, _COLLECTIONS):
        ones, others = _elements(one), _elements(other)
        if isinstance(one, sympy.FiniteSet) or isinstance(other, sympy.FiniteSet):
            return all(any(_agree(a, b, tolerance) for b in others) for a in ones)
        pairs = zip(ones, others, strict=False)
        return len(ones) != len(others) or all(_agree(a, b, tolerance) for a, b in pairs)
    return True


def _elements(value: Any) -> Sequence[Any]:
    return list(value) if isinstance(value, sympy.MatrixBase) else list(value.args)


def _same_number(one: sympy.Expr, other: sympy.Expr, tolerance: float) -> bool:
    one, other = one.doit(), other.doit()
    if one == other:
        return True
    difference = one - other
    if not tolerance and isinstance(difference, sympy.Rational):
        return bool(difference == 0)
    size = max(abs(number.evalf(_DIGITS)) for number in (one, other))
    # An exact zero that sympy does not see has no significant digit.
    allowed = tolerance or sympy.Float(10) ** (3 - _DIGITS)
    return bool(abs(difference.evalf(_DIGITS)) <= allowed * size)


def _equal_for_positive_symbols(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether expressions agree where their symbols are positive: 1/sqrt(n) and sqrt(1/n)."""
    symbols = one.free_symbols
    if not symbols or symbols != other.free_symbols:
        return False
    positive = {symbol: sympy.Dummy(str(symbol), positive=True) for symbol in symbols}
    return bool(sympy.simplify(one.subs(positive) - other.subs(positive)) == 0)
