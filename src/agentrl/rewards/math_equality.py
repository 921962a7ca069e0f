"""Whether two mathematical answers are equal.

math-verify rounds numbers to six decimals before it compares them, so any two small numbers are equal
to it (1/2^99 and 1/2^98). Here numbers without a decimal point must be equal, and others must agree to
six significant digits, each element of a tuple or set separately.

A unit on one side alone is no difference: the question may have named it. Units on both sides must
agree or convert into each other. A percentage equals its fraction (50% is 1/2), and also the number
before the sign, since `50` answers a question for a percentage; but only above 1, where a fraction
would not be meant.

As a program (`math_pool`), it compares answers: one JSON line in, one out. math-verify limits its own
work with SIGALRM, which works only in main threads and cannot interrupt C code. Here each comparison
has a CPU time limit, and the kernel kills a process that exceeds it. With a wall-clock limit, verdicts
would depend on the load of the machine.
"""

import json
import logging
import math
import resource
import signal
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import sympy
from latex2sympy2_extended import is_expr_of_only_symbols
from latex2sympy2_extended.sets import FiniteSet
from math_verify import verify

from agentrl.rewards.math_reading import Reading, read_answer, value_of

RELATIVE_TOLERANCE = 1e-6
"""Largest difference of two numbers of which one is a decimal, relative to the larger."""
_DIGITS = 40
"""Digits to which exact numbers are computed where their difference does not simplify to 0."""
_MAX_POINTS = 6
_MEMORY_BYTES = 4 * 2**30
_MAX_SIZE = 100_000.0
"""Digits of the largest number that is computed; the answer 9^9^9 would take all memory."""
_PERCENT = frozenset({("percent", 1)})
_SEQUENCES = (sympy.Tuple, sympy.FiniteSet, sympy.Interval)
_LESS = (sympy.StrictLessThan, sympy.LessThan)
_GREATER = (sympy.StrictGreaterThan, sympy.GreaterThan)
_UNDEFINED = (sympy.nan, sympy.zoo)


def is_equal(right: str, answer: str) -> bool:
    """Return whether an answer equals the right one.

    Symbols are case-sensitive: `A` and `a` differ. Choices are for the scorer `choice`, which accepts
    both.
    """
    one, other = read_answer(right), read_answer(answer)
    if not one.number or not other.number:
        return one.text == other.text
    if one.unit and other.unit:
        return _same_quantity(one, other)
    if one.unit or other.unit:
        return _same_number_of_units(one, other)
    return _same_formula(one.number, other.number)


def _same_formula(right: str, answer: str, factor: sympy.Expr = sympy.S.One) -> bool:
    """Return whether `right` and `answer` times a factor are equal."""
    one, other = value_of(right), value_of(answer)
    if one is None or other is None:
        return one is other is None and factor == 1 and right.split() == answer.split()
    if factor == 1:
        return _same(one, other)
    other = _right_side(other)
    return isinstance(other, sympy.Expr) and _same(one, other * factor)


def _same_quantity(one: Reading, other: Reading) -> bool:
    assert one.unit is not None
    assert other.unit is not None
    if one.unit.bases != other.unit.bases:
        return False
    sizes = [unit.factor * unit.scale for unit in (one.unit, other.unit)]
    return _same_formula(one.number, other.number, sympy.Rational(sizes[1] / sizes[0]))


def _same_number_of_units(one: Reading, other: Reading) -> bool:
    """Return whether answers are equal of which one has a unit."""
    unit = one.unit or other.unit
    assert unit
    if one.may_be_symbols or other.may_be_symbols:
        return _same_formula(one.text, other.text)
    scale = sympy.Integer(unit.scale)
    with_unit, bare = (one, other) if one.unit else (other, one)
    compare = partial(_same_formula, bare.number, with_unit.number)
    if unit.bases != _PERCENT:
        return compare(scale)
    return compare(scale / 100) or (_is_above_one(with_unit) and compare(scale))


def _is_above_one(reading: Reading) -> bool:
    value = value_of(reading.number)
    return isinstance(value, sympy.Expr) and bool(
        value.is_number and value.is_real and abs(value) > 1
    )


def _same(right: Any, answer: Any) -> bool:
    """Return whether the values of two formulas are equal."""
    if _is_undefined(right) or _is_undefined(answer):
        return False
    if isinstance(right, sympy.Eq) != isinstance(answer, sympy.Eq):
        right, answer = _right_side(right), _right_side(answer)
        if isinstance(right, sympy.Eq) or isinstance(answer, sympy.Eq):
            return False
    if isinstance(right, sympy.Interval) != isinstance(answer, sympy.Interval):
        right, answer = _solutions(right), _solutions(answer)
    if isinstance(right, sympy.Expr) and isinstance(answer, sympy.Expr):
        return _same_expression(right, answer)
    if isinstance(right, sympy.MatrixBase) and isinstance(answer, sympy.MatrixBase):
        return right.shape == answer.shape and _same_in_order(list(right), list(answer))
    if isinstance(right, _SEQUENCES) and isinstance(answer, _SEQUENCES):
        return _same_elements(right, answer)
    if isinstance(right, sympy.Rel) and isinstance(answer, sympy.Rel):
        return _same_relation(right, answer)
    return bool(verify(right, answer, timeout_seconds=None))


def _is_undefined(value: Any) -> bool:
    return bool(value.has(*_UNDEFINED))


def _right_side(value: Any) -> Any:
    """Return the right side of an equation whose left one only names it (`x`) or computes it (`2+3`)."""
    if not isinstance(value, sympy.Eq):
        return value
    is_name = not value.lhs.free_symbols or is_expr_of_only_symbols(value.lhs)
    return value.rhs if is_name else value


def _solutions(value: Any) -> Any:
    """Return the interval to which inequalities bound one symbol: [0, 1) of `0 <= x < 1`."""
    bounds = value.args if isinstance(value, sympy.And) else (value,)
    sides = [(one.lhs, one.rhs) for one in bounds if isinstance(one, (*_LESS, *_GREATER))]
    are_bounds = len(sides) == len(bounds) and len(value.free_symbols) == 1
    if are_bounds and all(
        (a.is_number and b.is_Symbol) or (a.is_Symbol and b.is_number) for a, b in sides
    ):
        return value.as_set()
    return value


def _same_elements(right: Any, answer: Any) -> bool:
    if isinstance(right, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        others = list(answer.args)
        return len(right.args) == len(others) and all(_take(one, others) for one in right.args)
    if isinstance(right, sympy.Interval) and isinstance(answer, sympy.Interval):
        ends = [(one.left_open, one.right_open) for one in (right, answer)]
        return ends[0] == ends[1] and _same_in_order(right.args[:2], answer.args[:2])
    return _same_in_order(_in_order(right), _in_order(answer))


def _take(one: Any, others: list[Any]) -> bool:
    """Remove an element that equals `one`; return False if there is none."""
    equal = next((other for other in others if _same(one, other)), None)
    if equal is not None:
        others.remove(equal)
    return equal is not None


def _same_in_order(ones: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    if ones is None or others is None or len(ones) != len(others):
        return False
    return all(map(_same, ones, others))


def _in_order(value: Any) -> Sequence[Any] | None:
    """Return the elements as they were written: a point is read as an interval, a list as a set."""
    if isinstance(value, sympy.Interval):
        return (value.start, value.end) if value.left_open and value.right_open else None
    elements: Sequence[Any] = value._unsorted_args if isinstance(value, FiniteSet) else value.args
    return elements


def _same_relation(right: Any, answer: Any) -> bool:
    """Return whether two equations, or two inequalities, have the same solutions."""
    right, answer = (one.reversed if isinstance(one, _LESS) else one for one in (right, answer))
    if type(right) is not type(answer):
        return False
    if right.lhs == answer.lhs:
        return _same(right.rhs, answer.rhs)
    if not all(isinstance(side, sympy.Expr) for one in (right, answer) for side in one.args):
        return _same(right.lhs, answer.lhs) and _same(right.rhs, answer.rhs)
    one, other = (_positive(one.lhs - one.rhs) for one in (right, answer))
    if not (_is_small(one) and _is_small(other)):
        return False
    ratio = sympy.simplify(one / other)
    if ratio.is_number and not _is_undefined(ratio):
        agree = _agree_below_zero(right.lhs - right.rhs, (answer.lhs - answer.rhs) * ratio)
        return agree and bool(ratio > 0 if isinstance(right, _GREATER) else ratio != 0)
    return bool(verify(right, answer, timeout_seconds=None))


def _same_expression(one: sympy.Expr, other: sympy.Expr) -> bool:
    if one == other:
        return True
    if not (_is_small(one) and _is_small(other)):
        return False
    one, other = one.doit(), other.doit()
    if one == other:
        return True
    if _is_undefined(one) or _is_undefined(other) or one.is_infinite or other.is_infinite:
        return False
    if one.is_number and other.is_number:
        return _same_number(one, other)
    return bool(sympy.simplify(_positive(one - other)) == 0) and _agree_below_zero(one, other)


def _same_number(one: sympy.Expr, other: sympy.Expr) -> bool:
    difference = one - other
    is_exact = not one.has(sympy.Float) and not other.has(sympy.Float)
    if is_exact and isinstance(difference, sympy.Rational):
        return bool(difference == 0)
    size = max(abs(number.evalf(_DIGITS)) for number in (one, other))
    # An exact zero that sympy does not see has no significant digit.
    allowed = sympy.Float(10) ** (3 - _DIGITS) if is_exact else RELATIVE_TOLERANCE
    return bool(abs(difference.evalf(_DIGITS)) <= allowed * size)


def _positive(value: sympy.Expr) -> sympy.Expr:
    """Return an expression of positive symbols and exact numbers, so that 1/sqrt(n) is sqrt(1/n)."""
    positive = {one: sympy.Symbol(one.name, positive=True) for one in value.free_symbols}
    return sympy.nsimplify(value.subs(positive), rational=True)


def _agree_below_zero(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Return whether expressions that are equal for positive symbols differ nowhere else: |x| is not x.

    Points at which a part of one has no real value, as `sqrt(n)` below 0, do not count.
    """
    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    sizes = {symbol: sympy.Float(1.37 + 0.21 * at) for at, symbol in enumerate(symbols)}
    negated = [{symbol} for symbol in symbols] + [set(symbols)]
    for signs in negated[:_MAX_POINTS]:
        point = {symbol: -size if symbol in signs else size for symbol, size in sizes.items()}
        parts = chain(sympy.preorder_traversal(one), sympy.preorder_traversal(other))
        of_values = (part for part in parts if isinstance(part, sympy.Expr))
        if not all(part.subs(point).evalf().is_real for part in of_values):
            continue
        if not _same_number(*(side.subs(point).evalf() for side in (one, other))):
            return False
    return True


def _is_small(value: Any) -> bool:
    return _size(value) <= _MAX_SIZE


def _size(value: Any) -> float:
    """Return a bound for the decimal digits of the numbers to which an expression evaluates."""
    if isinstance(value, sympy.Rational):
        return float((abs(value.p).bit_length() + value.q.bit_length()) * math.log10(2))
    sizes = [_size(one) for one in value.args]
    if isinstance(value, sympy.Pow):
        return sizes[0] * _magnitude(value.exp, sizes[1])
    if isinstance(value, sympy.factorial):
        return _magnitude(value.args[0], sizes[0]) * max(sizes[0], 1.0)
    if isinstance(value, (sympy.Product, sympy.Sum)):
        return sizes[0] * math.prod([_terms(limits) for limits in value.limits])
    return math.fsum(sizes) + 1.0


def _terms(limits: Any) -> float:
    """Return how many terms are computed one by one."""
    _, first, last = limits
    is_finite = isinstance(first, sympy.Integer) and isinstance(last, sympy.Integer)
    return float(min(max(last - first, 1), 10**300)) if is_finite else 1.0


def _magnitude(value: Any, size: float) -> float:
    """Return a bound for the absolute value of a number of so many digits, at least 1."""
    if isinstance(value, sympy.Rational):
        return max(1.0, float(min(abs(value), 10**300)))
    return math.pow(10, min(size, 300.0))


def main() -> None:
    """Serve until the input ends."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply: dict[str, object]
        try:
            reply = {
                "correct": any(is_equal(right, request["answer"]) for right in request["accepted"])
            }
        except Exception as error:  # noqa: BLE001  the library fails on odd answers in many ways
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps({"id": request["id"], **reply}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
