"""A process that compares mathematical answers: one JSON line in, one out.

math-verify limits its own work with SIGALRM, which works only in main threads and cannot interrupt
C code. Here each comparison has a CPU time limit, and the kernel kills a process that exceeds it.
With a wall-clock limit, verdicts would depend on the load of the machine.
"""

import json
import logging
import resource
import signal
import sys

from agentrl.rewards.math_equality import is_equal

_MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Serve until the input ends."""
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["cpu_seconds"])
        reply: dict[str, object]
        try:
            reply = {
                "correct": any(is_equal(right, request["answer"]) for right in request["accepted"])
            }
        except Exception as error:  # noqa: BLE001  the library fails on odd answers in many ways
            reply = {"error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps({"id": request["id"], **reply}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
