"""Imports of large libraries, exempted from garbage collection.

torch and transformers create hundreds of thousands of objects that live as long as the process. The
collector would scan them dozens of times during the import, and again in every full collection,
which blocks an event loop for tenths of a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Disable collection in the block, and exempt all objects that exist at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
