r"""Reading a mathematical answer: its text, the value that the text stands for, and the unit behind it.

latex2sympy reads the LaTeX. It was made for formulas, and takes short answers for others: units and
single letters behind a number vanish, `12:00` is a division by 0, `101_2` is 101, `2 3` is 5, and
letters lose their case. So what is no formula is rewritten here first.
"""

import re
from dataclasses import dataclass
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig

from agentrl.rewards.math_units import Unit, parse_unit
from agentrl.schema.answer_form import BOXED, find_answer

_MAX_CHARS = 1000
"""Longer formulas are compared as text."""
_MAX_DEPTH = 12
"""Brackets in brackets; the time to parse them grows with the square of their depth."""
_MAX_BINOMIAL_DIGITS = 4
"""Digits of a number in a binomial coefficient, which is computed as it is parsed."""
_UNIT_CHARS = 100
"""Length of the end of a text in which a unit is looked for."""
_LATEX = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
)
_SYMBOLS = ConversionConfig(lowercase_symbols=False)

_INTRODUCTION = re.compile(
    r"\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:(?:final|correct)\s+)?answer\s*(?:is\b|[:=])\s*:?",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$?(?!\s)([^$]+)(?<![\s\\])\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_SEPARATORS = re.compile(r"(?:\s|,|;|and|or)*")
_EMPHASIS = "*`_ \n"
_FULL_STOP = re.compile(r"(?<!\.)\.\Z")
_SET_AS_TEXT = re.compile(r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it)|mbox)\s*\{([^{}]*)\}")
_NUMBER_AS_TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it)|mbox)\s*\{([\s\d.,/+-]+)\}"
)
_SHORT_WORDS = frozenset({"no", "yes", "odd", "all"})
_SPACE = re.compile(r"(?:\\[,;: ]|\\q?quad\b|~|\s)+")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-z]))")
_CURRENCY = re.compile(r"([+-]?)\s*\\?([$€£])\s*([\d.][\d.,]*)")
_NUMBER_AND_UNIT = re.compile(
    r"(?P<number>.*?(?:[\d)}!]|\\pi))(?P<gap>\s*)"
    r"(?P<unit>(?:[A-Za-z°$€£]|\\?%)(?:[A-Za-z°\s./*]|\^\s*\{?\s*-?\d\s*\}?|(?<=[a-z])\d|\\cdot)*)",
    re.DOTALL,
)
_PLAIN_NUMBER = re.compile(r"[+-]?[\d.,]+", re.ASCII)
_CLOCK = re.compile(
    r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE | re.ASCII
)
_RATIO = re.compile(r"[^:=]+(?::[^:=]+){2,}")
_BASED = re.compile(r"(?<![\w\\.}])(\d+)_(?:\{(\d{1,2})\}|(\d))(?!\d)", re.ASCII)
_EXPONENT = re.compile(r"(?<![\w^])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,4})\b", re.ASCII)
_THOUSANDS = re.compile(r"(?<![\d.])(?<!\d,)\d{1,3}(?:(?:,|\{,\})\d{3})+(?!\d)(?!,\d)", re.ASCII)
_SPACED_THOUSANDS = re.compile(r"(?<![\d.] )(?<!\d)\d{1,3}(?: \d{3})+(?! ?\d)", re.ASCII)
_MIXED = re.compile(
    r"(?<![\w.^/}])(?P<whole>\d+)\s*(?:(?<=\s)(?P<top>\d+)\s*/\s*(?P<bottom>\d+)|"
    r"\\[dt]?frac\s*(?:\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s*(\d)))(?![\d/])",
    re.ASCII,
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))", re.ASCII)
_DOTS = re.compile(r"(?<![\d.])\s*(?:\\(?:[lc]?dots|dots[bcmio])(?![A-Za-z])|…|\.\.\.)")
_NAMES = re.compile(
    r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|"
    r"infinity|theta|infty)(?![A-Za-z])"
)
_ROOT = re.compile(r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)")
_ROOT_SIGN = re.compile(r"√\s*(\d+|[A-Za-z]|(?=\())", re.ASCII)
_PRIME = re.compile(r"(?<=[A-Za-z])('+)")
_POWER_SIGN = re.compile(r"\^\s*(-\s*\w+)")
_PRODUCT = re.compile(r"((?<![\w^{}.])\d+|(?<=\)))\s*(?=\(|\\[dt]?(?:frac|binom))", re.ASCII)
_TWO_NUMBERS = re.compile(r"(?<![_\d])\d+\s+\d", re.ASCII)
_BINOMIAL = re.compile(rf"\\[dt]?binom.{{0,50}}?\d{{{_MAX_BINOMIAL_DIGITS + 1}}}", re.DOTALL)
_COMPLEX = re.compile(r"(?<![A-Za-z\\_])i(?![A-Za-z])|\\(?:imath|det|Re|Im|arg)\b|\\mathbb\{C\}")
_SIGNS = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∞": r"\infty ", "π": r"\pi "}  # noqa: RUF001
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "²": "^2"}  # noqa: RUF001
    | {"³": "^3", "½": " 1/2", "¼": " 1/4", "¾": " 3/4"}
)


@dataclass(frozen=True)
class Reading:
    """An answer, taken apart."""

    text: str
    """The answer without what surrounds it; words in lower case."""
    number: str
    """What stands before the unit; "" if the answer is words."""
    unit: Unit | None = None
    may_be_symbols: bool = False
    """The unit may be a product of symbols instead: `5m`."""


def read_answer(text: str) -> Reading:
    """Take an answer apart into a number (or another formula) and its unit."""
    text = _bare(text)
    if (words := _words(text)) is not None:
        return Reading(words, "")
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", _CURRENCY.sub(r"\1\3 \2", text, count=1))
    plain = " ".join(_SPACE.sub(" ", _SET_AS_TEXT.sub(r" \1", _DEGREES.sub("°", text))).split())
    start, end = plain[:-_UNIT_CHARS], plain[-_UNIT_CHARS:]
    found = None if _CLOCK.fullmatch(plain) else _NUMBER_AND_UNIT.fullmatch(end)
    unit = parse_unit(found["unit"], is_marked=bool(found["gap"])) if found else None
    if found is None or unit is None:
        return Reading(text, text)
    number = start + found["number"]
    is_set_apart = found["gap"] and (_PLAIN_NUMBER.fullmatch(number) or _SET_AS_TEXT.search(text))
    return Reading(text, number, unit, unit.is_single_letter and not is_set_apart)


def value_of(text: str) -> Any | None:
    """Return the sympy object that a formula stands for; None if it cannot be read."""
    if len(text) > _MAX_CHARS:
        return None
    plain = " ".join(_SPACE.sub(" ", _SET_AS_TEXT.sub(r"\1", text)).split())
    if (clock := _CLOCK.fullmatch(plain)) and (seconds := _seconds(clock)) is not None:
        return seconds * sympy.Symbol("clock")
    if _RATIO.fullmatch(plain):
        return _ratio(plain.split(":"))
    text = _rewritten(text)
    if _depth(text) > _MAX_DEPTH or _BINOMIAL.search(text) or _TWO_NUMBERS.search(text):
        return None
    try:
        latex = normalize_latex(text, _LATEX)
        return latex2sympy(
            latex,
            is_real=not _COMPLEX.search(latex),
            normalization_config=None,
            conversion_config=_SYMBOLS,
        )
    except Exception:  # noqa: BLE001  the parser fails on odd texts in many ways
        return None


def _bare(text: str) -> str:
    """Return an answer without introduction, emphasis and the marks of a formula."""
    if "\\boxed" in text or "\\fbox" in text:
        text = find_answer(text, BOXED) or text
    text = _INTRODUCTION.sub("", text.strip(_EMPHASIS), count=1).strip(_EMPHASIS)
    text = _FULL_STOP.sub("", text).strip(_EMPHASIS)
    text = _NUMBER_AS_TEXT.sub(r"\1", _formula(text))
    text = _ROOT_SIGN.sub(lambda root: f"\\sqrt{{{root[1]}}}" if root[1] else "sqrt", text)
    return text.translate(_SIGNS).replace("\\!", "").replace("**", "^").strip()


def _formula(text: str) -> str:
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return text
    contents = ["".join(filter(None, formula.groups())) for formula in formulas]
    if _SEPARATORS.fullmatch(_FORMULA.sub("", text)):
        return ",".join(contents)
    behind = text[formulas[-1].end() :][:_UNIT_CHARS]
    return contents[-1] + (behind if parse_unit(behind, is_marked=True) else "")


def _words(text: str) -> str | None:
    r"""Return the words of an answer that has nothing else, such as `\text{no solution}`."""
    plain = _SET_AS_TEXT.sub(r"\1", text)
    words = plain.casefold().replace("-", " ").split()
    # Four letters in a row are no product of symbols.
    shortest = 2 if plain != text or plain.casefold() in _SHORT_WORDS else 4
    if not all(word.isalpha() for word in words) or _NAMES.search(plain):
        return None
    return " ".join(words) if any(len(word) >= shortest for word in words) else None


def _seconds(clock: re.Match[str]) -> int | None:
    """Return a time of day in seconds, by the 24 hour clock unless the text says which half it means."""
    hour, half = int(clock[1]), (clock[4] or "").lower()
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "p")
    return hour * 3600 + int(clock[2]) * 60 + int(clock[3] or 0)


def _ratio(parts: list[str]) -> Any | None:
    first, *others = [value_of(part) for part in parts]
    if first is None or first == 0 or any(other is None for other in others):
        return None
    return sympy.Tuple(sympy.Symbol("ratio"), *(other / first for other in others))


def _rewritten(text: str) -> str:
    """Write as formulas what latex2sympy takes for others."""
    text = _DEGREES.sub("", _DOTS.sub(r"\\text{dots}", text))
    text = _BASED.sub(_as_multiple_of_base, _REPEATING.sub(_as_fraction, text))
    text = _MIXED.sub(_as_sum, _SPACE.sub(" ", text)).replace("{,}", ",")
    if not re.search(r"[(\[]|\\\{", text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    text = _SPACED_THOUSANDS.sub(lambda number: number[0].replace(" ", ""), text)
    text = _NAMES.sub(r"\\\1", _ROOT.sub(r"\\sqrt{\1}", text))
    text = text.replace("\\infinity", "\\infty").replace("\\varnothing", "\\emptyset")
    text = _PRIME.sub(lambda primes: f"_{{{'p' * len(primes[1])}}}", text)
    return _PRODUCT.sub(r"\1\\cdot ", _POWER_SIGN.sub(r"^{\1}", text))


def _as_multiple_of_base(numeral: re.Match[str]) -> str:
    """Return `101_2` as 5 times a symbol: it equals neither 5 nor 12 in base 3."""
    base = int(numeral[2] or numeral[3])
    try:
        value = int(numeral[1], base) if base else None
    except ValueError:
        value = None
    if value is None:
        return f"{numeral[1]}\\cdot\\text{{base{base}notation}}"
    return str(value) if base == 10 else f"{value}\\cdot\\text{{base{base}}}"


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, start, period = decimal[1], decimal[2], decimal[3] or decimal[4]
    ninths = int(whole + start + period) - int((whole + start) or 0)
    return f"\\frac{{{ninths}}}{{{'9' * len(period)}{'0' * len(start)}}}"


def _as_sum(mixed: re.Match[str]) -> str:
    top, bottom = (part for part in mixed.groups()[1:] if part is not None)
    if int(top) >= int(bottom):
        return mixed[0]
    return f"({mixed['whole']}+\\frac{{{top}}}{{{bottom}}})"


def _depth(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest
