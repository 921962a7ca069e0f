"""Text-comparing scorers (`exact`, `em`, `gaia`, `similarity`), and `reported`, the agent's own reward.

`gaia` follows the rules of the GAIA benchmark for short answers. The type of the reference
determines how an answer is parsed:

- a number: `$`, `%` and `,` are taken out of the answer, and the numbers must be equal;
- a list (the reference holds a `,` or `;`): as many elements in the same order, each compared as a
  number where the reference's element is one, else as text whose punctuation counts;
- text: equal when white space, case and punctuation are ignored.

The rules are those of the benchmark, so that scores are comparable with published ones.
Two of them surprise authors of references: `1,000` is a list of two elements, not a number (write
`1000`), and a unit turns a number into a text (`17 m` accepts `17m`, not `17`). Four are corrected:
the benchmark reads any answer that is not a number as infinity, so that a reference `inf` would
accept all of them; here only an infinite answer equals it. A reference `Nan` (a name) is a number
that equals nothing there, and a text here, and so is `1_0`. Of texts, punctuation that carries
meaning counts (see `em`): `1.5 m` is not `15 m`, and `!` is not an empty answer. A rollout without
an answer scores 0, even where the reference is `None`.
"""

import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl.errors import ScorerDefect
from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.schema import GroundTruth

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MARK = f"[{re.escape(string.punctuation)}]"
_PUNCTUATION = re.compile(
    rf"(?={_MARK})(?:(?<=\d),(?=\d{{3}}(?!\d))|(?P<meant>(?<=\d){_MARK}(?=\d)|(?<![^\W_])[.-](?=[$£€]?\.?\d)|"
    rf"(?<=[^\W\d_])[+#]+|(?<=\b[a-z])-(?!\w)|(?<=\b[a-z]{{2}})-(?!\w)|[<>=^])|{_MARK})"
)  # The mark is looked for first: most characters are none, and need no further try.
"""Punctuation; `meant` is that which carries meaning: within or before a number, or behind a name."""
_MINUS = "\N{MINUS SIGN}"
_NOT_IN_NUMBERS = str.maketrans("", "", "$%,")
_DIVIDERS = re.compile("[,;]")
_SPACE = re.compile(r"\s")
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
"""A word, or a character of a script without spaces between words."""
_MAX_WORD_CHARS = 1000
"""Longer words are normalized in pieces: normalization takes n squared steps for n combining
characters in a row."""


@MCPScorerFactory.register_scorer("exact", needs_answer=True, compares_text=True)
async def exact(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer equals a correct one, ignoring leading and trailing whitespace."""
    text = answer.strip()
    return Verdict(float(any(text == right.strip() for right in truth.accepted)))


@MCPScorerFactory.register_scorer("reported")
async def reported(answer: str, truth: GroundTruth) -> Verdict:
    """Raise an error, because the agent should have returned its reward but did not."""
    raise ScorerDefect(
        "the agent returned no reward; return agentrl.AgentResult(answer, reward=...), or choose "
        "another scorer",
        kind="reported",
    )


@MCPScorerFactory.register_scorer("similarity", needs_answer=True, compares_text=True)
async def similarity(answer: str, truth: GroundTruth) -> Verdict:
    """Return the cosine of the word counts of the answer and the most similar correct one."""
    counts = Counter(_WORD.findall(answer.casefold()))
    references = (Counter(_WORD.findall(right.casefold())) for right in truth.accepted)
    return Verdict(max((_cosine(counts, reference) for reference in references), default=0.0))


@MCPScorerFactory.register_scorer("em", needs_answer=True, compares_text=True)
async def exact_match(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer equals a correct one, ignoring case, punctuation, articles and spacing.

    This is the exact match of SQuAD and Natural Questions, which would pay `5` for `-5` and `C#` for
    `C++`. It departs from it in these points:

    - Punctuation counts where it carries meaning: the sign of a number and all within one (`1.5`,
      `10:30`, `1/2`), except a comma between thousands; `+` and `#` behind a letter, the charge or
      grade in `O-`, and `<`, `>`, `=` and `^`.
    - An answer of nothing but punctuation or articles (`>`, `A`) is compared as it is.
    - Unicode is normalized (NFKC), so that full-width letters equal narrow ones.
    """
    normalized = normalize_text(answer)
    correct = any(normalized == normalize_text(right) for right in truth.accepted)
    return Verdict(float(correct), detail=normalized)


def normalize_text(text: str) -> str:
    """Return text in lower case without articles, superfluous space and meaningless punctuation."""
    folded = " ".join(map(_nfkc, text.split())).casefold().replace(_MINUS, "-")
    bare = _without_punctuation(folded)
    return " ".join(_ARTICLES.sub(" ", bare).split()) or " ".join(bare.split()) or folded


def _without_punctuation(text: str) -> str:
    return _PUNCTUATION.sub(lambda mark: mark["meant"] or "", text)


def _nfkc(word: str) -> str:
    pieces = (
        word[start : start + _MAX_WORD_CHARS] for start in range(0, len(word), _MAX_WORD_CHARS)
    )
    return "".join(unicodedata.normalize("NFKC", piece) for piece in pieces)


@MCPScorerFactory.register_scorer("gaia", needs_answer=True, compares_text=True)
async def gaia(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is correct by GAIA's rules."""
    correct = any(gaia_equal(answer, right) for right in truth.accepted)
    return Verdict(float(correct), detail=answer.strip())


def gaia_reward_func(
    data_source: str,
    solution_str: str,
    ground_truth: str | float | None,
    extra_info: Mapping[str, Any] | None = None,
) -> float:
    """Return 1.0 if the first `<answer>` of a solution is correct by GAIA's rules, else 0.0.

    It has the reward signature of agent engines; the samplers' scorer `gaia` uses the last
    `<answer>` outside of the model's thinking.

    Args:
        data_source: unused.
        solution_str: the agent's answer.
        ground_truth: the reference; None stands for the text `None`.
        extra_info: unused.
    """
    _, _, rest = solution_str.partition(_ANSWER)
    answer, end, _ = rest.partition(_ANSWER_END)
    return float(gaia_equal(answer.strip(), str(ground_truth))) if end else 0.0


def gaia_equal(answer: str, right: str) -> bool:
    """Return whether an answer is correct by GAIA's rules."""
    if _number(right) is not None:
        return _same_number(answer, right)
    if not _DIVIDERS.search(right):
        one, other = _bare(answer), _bare(right)
        return (_without_punctuation(one) or one) == (_without_punctuation(other) or other)
    elements, expected = _DIVIDERS.split(answer), _DIVIDERS.split(right)
    return len(elements) == len(expected) and all(map(_same_element, elements, expected))


def _same_element(element: str, expected: str) -> bool:
    if _number(expected) is not None:
        return _same_number(element, expected)
    return _bare(element) == _bare(expected)


def _same_number(answer: str, right: str) -> bool:
    number, expected = _number(answer.translate(_NOT_IN_NUMBERS)), _number(right)
    return number is not None and number == expected


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    # Python allows 1_0 for 10.
    return None if math.isnan(value) or "_" in text else value


def _bare(text: str) -> str:
    return _SPACE.sub("", text).lower()


def _cosine(left: Counter[str], right: Counter[str]) -> float:
    shared = sum(count * right[word] for word, count in left.items())
    # The root of the product is exact where both texts have the same words.
    squares = [sum(count * count for count in counts.values()) for counts in (left, right)]
    return shared / math.sqrt(math.prod(squares)) if shared else 0.0
