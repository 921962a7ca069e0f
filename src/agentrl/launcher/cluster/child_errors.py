"""The reason of a child's failure, as its log gives it."""

import re

from agentrl.runtime.processes.child_processes import Child

# A command's error message, or the last line of a traceback, which may be inside an exception group.
_ERROR = re.compile(r"(?:\[rank\d+\]: |[ |]+)?(agentrl \w+: .+|[\w.]*(?:Error|Exception): .+)")
_TAIL_LINES = 200


def last_error(child: Child) -> str:
    """Return the line of a failed child's log that gives the reason; the last line if none does.

    `accelerate launch` appends its own report, without a reason, to the ranks' output.
    """
    errors = [_ERROR.fullmatch(line) for line in child.log_tail(_TAIL_LINES).splitlines()]
    messages = [error[1] for error in errors if error is not None]
    return messages[-1] if messages else child.log_tail(1)
