"""Imports of large libraries that the garbage collector is spared.

torch and transformers are hundreds of thousands of objects that live as long as their process. The
collector would go through them dozens of times while they are loaded, and again whenever it looks at
everything, which holds up an event loop for tenths of a second.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_imports() -> Iterator[None]:
    """Collect nothing within the block, and never what is there at its end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
