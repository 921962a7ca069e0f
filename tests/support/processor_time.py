"""Processor time, which does not depend on what else the machine does."""

import resource


def children_seconds() -> float:
    """Return the processor time of all children that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
