"""Shows errors of `AgentTrainer` in one line where scripts and notebooks do not handle them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType

from agentrl.config.secrets import redact
from agentrl.errors import AgentRLError
from agentrl.runtime.printable import printable

_LINES = "_render_traceback_"
"""Attribute of an exception: a function of the lines that IPython shows in place of its traceback."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Let an error that leaves the block, and then the program, be shown without a traceback.

    The message says what to do; a traceback through AgentRL's own code would only hide it.
    """
    try:
        yield
    except (AgentRLError, KeyboardInterrupt) as error:
        text = f"AgentTrainer: {printable(redact(str(error) or 'interrupted'))}"
        vars(error)[_LINES] = lambda: [text]
        _extend_excepthook()
        raise


@cache  # once: hooks that other libraries have installed since then call this one
def _extend_excepthook() -> None:
    previous = sys.excepthook

    def show(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if _LINES in vars(error):
            sys.stderr.write("\n".join(vars(error)[_LINES]()) + "\n")
        else:
            previous(kind, error, traceback)

    sys.excepthook = show
