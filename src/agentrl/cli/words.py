"""Small pieces of text for terminals."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str, limit: int | None = None) -> str:
    """Return text from outside so that it cannot steer the terminal, cut to `limit` characters."""
    shown = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
    if limit is not None and len(shown) > limit:
        return f"{shown[:limit]}… ({len(text)} characters)"
    return shown


def figure(value: float | None) -> str:
    """Return a figure with three digits after the point, `-` for none."""
    return "-" if value is None else f"{value:.3f}"


def since(seconds: float) -> str:
    """Return a length of time in the unit that fits."""
    if seconds < 120:
        return f"{max(seconds, 0.0):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
