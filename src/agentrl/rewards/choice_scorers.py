"""Scorers of structured answers: `choice` (multiple choice) and `calls` (function calls as JSON)."""

import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.rewards.text_scorers import normalize_text
from agentrl.schema import GroundTruth

_LETTER = re.compile(r"[(\[]?([A-Za-z])[)\].:]*(?:\s.*)?", re.DOTALL)
_DRESSED = re.compile(
    r"\\(?:text|math|boxed)[a-z]*\s*\{([^{}]*)\}|(?<!\w)(\*{1,3}|[$`])([^*$`]+)\2(?!\w)|\\\(([^\\]+)\\\)"
)
"""What TeX or Markdown sets apart."""
_NAMED = re.compile(r"\A(?:option|choice|answer)[\s:]+(?=[(\[]?[A-Z]\b)", re.IGNORECASE)
_DASH = re.compile(r"\A([A-Za-z])\s+[-\u2013\u2014:](?=\s+\S\S)")
_ONE_LETTER = re.compile(r"[A-Za-z]")
_BRACKETED = re.compile(r"[(\[]([A-Za-z])[)\]]")
_FENCE = re.compile(r"\A```\w*\n(.*)\n```\Z", re.DOTALL)


@MCPScorerFactory.register_scorer("choice", needs_answer=True, compares_text=True)
async def choice(answer: str, truth: GroundTruth) -> Verdict:
    r"""Return 1 if the answer is the right letter (`B`, `(b)`, `B. text`) or a right choice's text.

    The reference is the letter; the texts of right choices are further right answers. `**B**`, `\text{B}`,
    `$B$`, `Option B` and `B - text` name the letter as well.
    """
    text = answer.strip()
    bare = _DRESSED.sub(lambda found: found[1] or found[3] or found[4] or "", text).strip()
    letter = _chosen_letter(bare)
    given = {normalize_text(text), normalize_text(bare)}
    texts = [right.strip() for right in truth.accepted if not _ONE_LETTER.fullmatch(right.strip())]
    # Text first: "C. elegans" may be the text of a choice. "A. Paris" is not Paris without an article.
    if any(_chosen_letter(one) == letter and normalize_text(one) in given for one in texts):
        return Verdict(1.0, detail=text)
    correct = letter is not None and letter in {right.strip().upper() for right in truth.accepted}
    return Verdict(float(correct), detail=letter or "no letter")


def _chosen_letter(text: str) -> str | None:
    text = _DASH.sub(r"\1.", _NAMED.sub("", text))
    found = _LETTER.fullmatch(text)
    if found is None or any(
        other.upper() != found[1].upper() for other in _BRACKETED.findall(text)
    ):
        return None
    # "A dog" is a text, "A. dog" and "(A) dog" name a letter.
    marked = len(text) == 1 or not text[:1].isalpha() or not text[1:2].isspace()
    return found[1].upper() if marked else None


@MCPScorerFactory.register_scorer("calls", needs_answer=True)
async def calls(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is a JSON list of the right function calls, in any order.

    References are `{"name", "arguments"}` (arguments must be equal), or BFCL's `{name: {argument:
    [right values]}}`, where a list with "" makes the argument optional.
    """
    try:
        given = _calls(answer)
    except (ValueError, RecursionError) as error:
        return Verdict(0.0, detail=f"not a JSON list of calls: {error}")
    expected = truth.answer if isinstance(truth.answer, list) else [truth.answer]
    return Verdict(float(len(given) == len(expected) and _match(expected, given)))


def _calls(answer: str) -> list[Mapping[str, Any]]:
    text = answer.strip()
    fenced = _FENCE.match(text)
    value = json.loads(fenced[1] if fenced else text)
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict) and {"name", "arguments"} == one.keys() for one in listed):
        raise ValueError("each call has `name` and `arguments`")
    return listed


def _match(expected: list[Any], given: list[Mapping[str, Any]]) -> bool:
    """Return whether the calls can be assigned to each other, one to one."""
    if not expected:
        return True
    first, *others = expected
    return any(
        _is_right(first, call) and _match(others, given[:at] + given[at + 1 :])
        for at, call in enumerate(given)
    )


def _is_right(expected: Any, call: Mapping[str, Any]) -> bool:
    if not isinstance(expected, dict):
        return False
    arguments = call["arguments"]
    if expected.keys() == {"name", "arguments"}:
        return bool(call["name"] == expected["name"] and arguments == expected["arguments"])
    ((name, allowed),) = expected.items() if len(expected) == 1 else (("", {}),)
    if call["name"] != name or not isinstance(arguments, dict) or arguments.keys() - allowed.keys():
        return False
    return all(
        arguments[key] in values if key in arguments else "" in values
        for key, values in allowed.items()
    )
