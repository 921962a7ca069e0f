"""Names of weighted sums of scorers, such as `gaia + 0.3*similarity`, as terms."""

import re

_TERM = re.compile(r"\s*(?:(-?\d*\.?\d+)\s*\*\s*)?([^\s+*]+)\s*")


def weighted_terms(name: str) -> list[tuple[float, str]]:
    """Return the weights and names that a name sums; nothing if it is no sum."""
    matches = [_TERM.fullmatch(text) for text in name.split("+")]
    terms = [(float(match[1] or 1), match[2]) for match in matches if match is not None]
    is_sum = len(terms) == len(matches) and ("+" in name or "*" in name)
    return terms if is_sum else []
