r"""Makes external text safe for terminals and log files.

Input: any text, such as a task's id, a tool's error or a model's reply. Output: the same text with
escapes (`\x1b`) for characters that control a terminal, reorder or hide others, cannot be encoded,
or start a new line.
"""

import json
import re

# Control characters except tab and newline (they include ESC and the 8-bit CSI); characters that are
# invisible or reorder text, except the joiners that scripts and emoji need; lone surrogates; tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str, limit: int | None = None) -> str:
    """Return text that cannot steer a terminal, of at most `limit` characters and a note."""
    cut = text if limit is None else text[:limit]
    safe = _UNSAFE.sub(_escaped, cut)
    return safe if len(cut) == len(text) else f"{safe}… ({len(text)} characters)"


def one_line(text: str, limit: int | None = None) -> str:
    r"""Return `printable` text on a single line, with `\n` for each line break."""
    return printable(text, limit).replace("\n", "\\n").replace("\t", " ")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 record`, `12,000 records`."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def printable_json(text: str) -> str:
    """Return JSON text of the same value that cannot control a terminal."""
    # JSON contains these characters only inside strings.
    return _UNSAFE.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
