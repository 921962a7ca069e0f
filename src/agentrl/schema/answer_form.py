r"""The forms in which a model writes its final answer, by the name of an `answer_schema`.

| Schema | The answer is |
|---|---|
| `boxed` | the argument of the last `\boxed{}`, else of the last `\fbox{}`, else the number behind `\boxed` |
| `####`, `Answer:` (a marker: signs `#`, or words with a colon) | the rest of the line after the last one |
| ```` ``` ```` | the content of the last fenced block |
| `answer` (the name of a tag) | the content of the last `<answer></answer>` |

One module, because a question that asks for one form while another is looked for is rewarded with
0 for ever: extraction, what a text asks for, and what a model is told all follow the same table.
"""

import re

BOXED, FENCE, TAG = "boxed", "```", "answer"

_TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_MARKER = re.compile(r"#{2,6}|[A-Za-z][A-Za-z ]{0,30}:")
_BOXED, _FBOX = re.compile(r"\\boxed\s*+\{"), re.compile(r"\\fbox\s*+\{")
_BARE = re.compile(r"\\boxed\s*+([+-]?\d(?:[\d.,/]*\d)?)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""Also matches escaped characters, so that escaped braces, which belong to the answer, are skipped."""
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
# A text may hold `Answer:` without asking for it ("Question: ... Answer:"), so a request is needed.
# Its words are bounded: each `follow` of a long word would be read to the end of that word.
_REQUEST = r"(?:after|form|format|line|follow\w{0,3})\b[^\n]{0,60}?"
_ASKED: tuple[tuple[str, re.Pattern[str]], ...] = (
    (TAG, re.compile(r"<answer>")),
    (BOXED, re.compile(r"\\boxed\b")),
    ("####", re.compile(_REQUEST + r"####", re.IGNORECASE)),
    ("Answer:", re.compile(_REQUEST + r"Answer:", re.IGNORECASE)),
    (FENCE, re.compile(r"```python\b(?=[^`]{0,40}(?:your code|code here|\Z|```))", re.IGNORECASE)),
)


def is_answer_schema(text: str) -> bool:
    """Return whether a text is the name of a schema: see the table above."""
    return text == FENCE or any(form.fullmatch(text) for form in (_TAG_NAME, _MARKER))


def written(schema: str) -> str:
    r"""Return how an answer of this schema is written, such as `\boxed{}`."""
    if schema == BOXED:
        return r"\boxed{}"
    if schema == FENCE:
        return "```python ... ```"
    return f"{schema} ..." if _MARKER.fullmatch(schema) else f"<{schema}></{schema}>"


def instruction(schema: str) -> str:
    """Return the sentence that asks a model for this schema."""
    if schema == FENCE:
        return "Write the program in one ```python block."
    if _MARKER.fullmatch(schema):
        return f"Write the final answer on the last line, after {schema}"
    return f"Put the final answer inside {written(schema)}."


def asked_schema(text: str) -> str | None:
    """Return the schema that a text asks for, or None; the last one counts if it asks for several."""
    found = [(match.end(), schema) for schema, form in _ASKED for match in form.finditer(text)]
    return max(found)[1] if found else None


def is_asked(schema: str, text: str) -> bool:
    """Return whether a text tells a model of this schema."""
    if schema == BOXED:
        return "\\boxed" in text
    if schema == FENCE or _MARKER.fullmatch(schema):
        return schema in text
    return f"<{schema}>" in text


def added_instruction(setting: str, schema: str, *told: str) -> str:
    """Return what is added to a question, or "".

    Args:
        setting: `--answer_instruction`: `auto`, `none` or the text itself.
        schema: the task's answer schema.
        *told: the texts that the model reads before its first turn.
    """
    if setting == "none":
        return ""
    if setting != "auto":
        return setting
    return "" if any(is_asked(schema, text) for text in told) else instruction(schema)


def find_answer(text: str, schema: str) -> str | None:
    """Return the final answer in a visible text, or None."""
    if schema == BOXED:
        answer = _last_braced(text, _BOXED)
        answer = answer if answer is not None else _last_braced(text, _FBOX)
        return answer if answer is not None else next(iter(_BARE.findall(text)[-1:]), None)
    if schema == FENCE:
        blocks = _FENCED.findall(text)
        return str(blocks[-1]) if blocks else None
    if _MARKER.fullmatch(schema):
        _, marker, rest = text.rpartition(schema)
        # Emphasis around the marker and its answer belongs to neither: **Answer:** 7
        return (rest.split("\n", 1)[0].strip().strip("*").strip() or None) if marker else None
    tags = list(re.finditer(rf"<(/?){re.escape(schema)}>", text, re.IGNORECASE))
    end = max((at for at, tag in enumerate(tags) if tag[1]), default=0)
    start = next((tag for tag in reversed(tags[:end]) if not tag[1]), None)
    return text[start.end() : tags[end].start()].strip() if start else None


def _last_braced(text: str, command: re.Pattern[str]) -> str | None:
    """Return the argument of the last complete `command{...}`."""
    arguments = {match.end() for match in command.finditer(text)}
    last: tuple[int, int] | None = None
    open_: list[int] = []
    for brace in _BRACE.finditer(text) if arguments else ():
        if brace[0] == "{":
            open_.append(brace.end())
        elif brace[0] == "}" and open_:
            begin = open_.pop()
            if begin in arguments and (last is None or begin > last[0]):
                last = begin, brace.start()
    return None if last is None else text[last[0] : last[1]].strip()
