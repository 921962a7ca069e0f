"""Units behind numbers: what a text such as `km/h`, `square feet` or `million dollars` stands for."""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

# By base unit: the value of a unit in it, and the names of that unit.
_TABLE = {
    "m": {"1/1000": "mm millimeter millimetre", "1/100": "cm centimeter centimetre"}
    | {"1/10": "dm decimeter decimetre", "1": "m meter metre", "1000": "km kilometer kilometre"},
    "inch": {"1": "in inch inches", "12": "ft foot feet", "36": "yd yard", "63360": "mi mile"},
    "g": {"1/1000": "mg milligram", "1": "g gram", "1000": "kg kilogram"},
    "pound": {"1/16": "oz ounce", "1": "lb lbs pound"},
    "s": {"1/1000": "ms millisecond", "1": "s sec second", "60": "min minute"}
    | {"3600": "h hr hour", "86400": "day", "604800": "week"},
    "year": {"1/12": "month", "1": "yr year"},
    "l": {"1/1000": "ml mL milliliter millilitre", "1": "l L liter litre"},
    "dollar": {"1/100": "cent", "1": "dollar usd $"},
    "euro": {"1": "euro eur €"},
    "sterling": {"1": "gbp £"},
    "degree": {"1": "° deg degree"},
    "radian": {"1": "rad radian"},
    "celsius": {"1": "°C celsius"},
    "fahrenheit": {"1": "°F fahrenheit"},
    "percent": {"1": "% percent pct percentage"},
    "newton": {"1": "N newton"},
    "joule": {"1": "J joule", "1000": "kJ", "3600000": "kWh kwh"},
    "watt": {"1": "W watt", "1000": "kW"},
    "volt": {"1": "V volt"},
    "hertz": {"1": "Hz hertz"},
}
_KNOWN = {
    name: (base, Fraction(value))
    for base, units in _TABLE.items()
    for value, names in units.items()
    for name in names.split()
}
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3} | {
    word: 10**power for word, power in (("million", 6), ("billion", 9), ("trillion", 12))
}
_SHORT = {"mph": "mile/hour", "kmh": "km/h", "kph": "km/h", "sqft": "square feet"}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_NO_BASES = {"unit", "of", "st", "nd", "rd", "th"}
_NO_UNITS = frozenset(
    [
        "and",
        "or",
        "mod",
        "times",
        "choose",
        "plus",
        "minus",
        "over",
        "pi",
        "sin",
        "cos",
        "tan",
        "cot",
        "csc",
        "log",
        "exp",
        "sqrt",
        "max",
        "gcd",
        "lcm",
        "are",
        "than",
        "for",
        "not",
        "undefined",
        "infinity",
    ]
)
_TEMPERATURE = re.compile(r"(?:°|degrees?)\s*(C\b|F\b|celsius|fahrenheit)", re.IGNORECASE)
_TOKEN = re.compile(r"(?P<word>[A-Za-z]+|°[CF]?|[%$€£])(?:\s*\^?(?P<power>-?\d))?|(?P<slash>/)")


@dataclass(frozen=True)
class Unit:
    """A unit as a product of base units."""

    bases: frozenset[tuple[str, int]]
    """Base units with their exponents; empty for a bare number word (`million`)."""
    factor: Fraction
    """The unit's value in its base units."""
    scale: int
    """The factor of number words: 1000000 in `million dollars`."""
    is_single_letter: bool
    """Its names have one letter each, and may be symbols: `5m`."""


def parse_unit(text: str, *, is_marked: bool) -> Unit | None:
    """Return the unit that a text names, or None if the text is part of an expression."""
    bases: Counter[str] = Counter()
    factor, scale, sign, power = Fraction(1), 1, 1, 1
    words = []
    for token in _TOKEN.finditer(_written_out(text)):
        word = _spelled(token["word"] or "per")
        words.append(word)
        if word == "per" or (word == "a" and len(words) > 1):
            sign = -1
        elif word in _POWERS:
            power = _POWERS[word]
        elif word in _SCALES:
            scale *= _SCALES[word]
        elif word not in _NO_BASES:
            named = _KNOWN.get(word) or _unknown(word, is_marked)
            if named is None:
                return None
            exponent = sign * power * int(token["power"] or 1)
            bases[named[0]] += exponent
            factor *= named[1] ** exponent
            power = 1
    if all(word in ("per", "of") for word in words):
        return None
    is_single_letter = all(len(word) == 1 and word.isalpha() for word in words if word != "per")
    return Unit(frozenset(bases.items()), factor, scale, is_single_letter)


def _written_out(text: str) -> str:
    text = _TEMPERATURE.sub(lambda found: f"°{found[1][0].upper()}", text)
    return re.sub(r"[A-Za-z]+", lambda word: _SHORT.get(word[0].lower(), word[0]), text)


def _spelled(word: str) -> str:
    """Return a word in the spelling of the tables: `Meters` as `meter`."""
    if word in _KNOWN or len(word) < 3:
        return word
    word = word.lower()
    is_listed = any(word in table for table in (_KNOWN, _SCALES, _POWERS, _NO_UNITS))
    return word if is_listed else word.removesuffix("s")


def _unknown(word: str, is_marked: bool) -> tuple[str, Fraction] | None:
    # Three letters and a vowel make a word; xyz is a product.
    is_word = len(word) >= 3 and re.search("[aeiou]", word) is not None
    return (word, Fraction(1)) if is_marked and is_word and word not in _NO_UNITS else None
