"""One line that says what went wrong with a tool server."""

from mcp import MCPError

_MAX_CHARS = 500


def describe(error: BaseException) -> str:
    """Say in one short line what went wrong, looking into exception groups.

    Servers word their errors, so that what terminals would act upon is taken out.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error)[: 2 * _MAX_CHARS].split())[:_MAX_CHARS]
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    if isinstance(error, MCPError) and text:
        return text
    if isinstance(error, TimeoutError) and not text:
        return "timed out"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
