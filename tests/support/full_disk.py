"""Writing that fails as on a full disk."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(max_bytes: int) -> Iterator[None]:
    """Let the kernel refuse what this process writes to a file beyond so many bytes.

    Python ignores the signal that comes along, so what is left is the error of the write.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
