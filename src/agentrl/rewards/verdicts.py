"""What a judge's reply decides.

Strict on purpose: a reply counts if all of it is one verdict. That a verdict's word occurs in it
says nothing ("not correct", "correct, but ..."), and a judge that is unclear can be asked again.
"""

import json
import re

_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)
_FENCE = re.compile(r"\A```(?:json)?\s*(.*?)\s*```\Z", re.DOTALL)
_ENGLISH = re.compile(
    r"(?:(?:verdict|judge?ment|result) )?"
    r"(?:(?:(?:the |this )?(?:given |predicted )?(?:answer|response|prediction)|it|this) is )?"
    r"(?P<negated>not )?(?P<word>correct|incorrect|wrong)"
)
_CHINESE = re.compile(
    r"(?:(?:判断|结论|结果) )?(?:该?(?:回答|答案))?是?(?P<word>正确|不正确|错误)的?"
)
_VERDICT_KEYS = ("verdict", "judgement", "judgment", "result")
_TRUTH_KEYS = ("correct", "is_correct")
_TRUTHS = {"yes": True, "true": True, "no": False, "false": False}


def parse_verdict(reply: str) -> bool | None:
    """Return the verdict of a judge's reply, or None if it is not one clear verdict.

    A reply is clear, thinking, Markdown and punctuation aside, if it is one word (`Correct`,
    `Incorrect`, `wrong`, also in Chinese), one plain sentence around it (`The answer is not
    correct.`), or a JSON object with a verdict under `verdict`, `judgement`, `result`, `correct` or
    `is_correct`.
    """
    visible = _THINK.sub("", reply).rpartition("</think>")[2].strip()
    fenced = _FENCE.match(visible)
    text = fenced[1] if fenced else visible
    if text.startswith("{"):
        return _of_object(text)
    return _of_words(text)


def _of_words(text: str) -> bool | None:
    plain = re.sub(r"n['\u2019]t\b", " not", text.casefold())
    words = " ".join(re.findall(r"[^\W_]+", plain))
    if english := _ENGLISH.fullmatch(words):
        is_right = english["word"] == "correct"
        if english["negated"]:
            # "Not wrong" is what judges say who do not want to decide.
            return False if is_right else None
        return is_right
    if chinese := _CHINESE.fullmatch(words):
        return chinese["word"] == "正确"
    return None


def _of_object(text: str) -> bool | None:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None
    found: set[bool | None] = set()
    for key, item in value.items():
        name = key.casefold()
        if name in _VERDICT_KEYS:
            found.add(_of_words(item) if isinstance(item, str) else None)
        elif name in _TRUTH_KEYS:
            said = _TRUTHS.get(item.casefold()) if isinstance(item, str) else item
            found.add(said if isinstance(said, bool) else None)
    return found.pop() if len(found) == 1 else None
