"""Compiles grammars in a child process first, because they may crash it.

The compiler is native code that recurses over what clients send: a stack overflow there ends the
process. It also cannot be stopped: a `multipleOf` of 999983 keeps it busy, whatever the library's own
limits are. `GrammarTrial` is the parent's side. The child (`python -m` of this module) has less stack
than the parent gives the compiler, and limits on memory and time.
"""

import json
import os
import resource
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from agentrl.errors import AgentWorkerError
from agentrl.plugins.engine.generation.grammars import GrammarCompiler
from agentrl.runtime.processes.request_process import RequestProcess
from agentrl.schema.grammar import Grammar

COMPILER_STACK_BYTES = 64 << 20
"""Stack size of the thread that compiles in the parent."""
_TRIAL_STACK_BYTES = 8 << 20
_MEMORY_BYTES = 1 << 30
_COMPILE_SECONDS = 5.0
_START_SECONDS = 60.0
_MAX_VERDICTS = 1024
_LIMIT_EXCEEDED = "it exceeds the limits on a grammar's time, memory or recursion"


class GrammarTrial:
    """Tests grammars. Used by one thread."""

    def __init__(self, tokenizer: Path, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._argv = [sys.executable, "-P", "-m", __spec__.name, str(tokenizer), str(vocab_size)]
        self._argv += map(str, sorted(end_ids))
        self._child: RequestProcess | None = None
        self._is_fresh = True
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()

    def check(self, grammar: Grammar) -> None:
        """Raise a `ValueError` with the reason unless the grammar can be compiled safely."""
        if grammar not in self._verdicts:
            self._verdicts[grammar] = self._test(grammar)
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        if self._verdicts[grammar]:
            raise ValueError(self._verdicts[grammar])

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close(grace_seconds=0)  # it may be compiling
            self._child = None

    def _test(self, grammar: Grammar) -> str:
        if self._child is None:
            self._child = RequestProcess("the grammar trial", self._argv, os.environ, quiet=True)
            if self._ask({}, _START_SECONDS) is None:
                raise RuntimeError("the process that tests grammars did not start")
            self._is_fresh = True
        verdict = self._ask({"kind": grammar.kind, "text": grammar.text}, _COMPILE_SECONDS)
        is_fresh, self._is_fresh = self._is_fresh, False
        if verdict is None:
            # Earlier grammars take memory, too, so a fresh process tests the grammar again.
            return _LIMIT_EXCEEDED if is_fresh else self._test(grammar)
        return verdict

    def _ask(self, request: Mapping[str, Any], seconds: float) -> str | None:
        """Return the child's problem with a request; None if it died or took too long, and ended."""
        assert self._child is not None
        try:
            return str(self._child.ask_and_wait(request, seconds)["problem"])
        except (AgentWorkerError, TimeoutError):
            self.close()
            return None


def main(tokenizer: str, vocab_size: str, *end_ids: str) -> None:
    """Answer every line of stdin with a line that has the problem of its grammar, if any.

    Several threads, as those of a `RequestServer`, would share the limits of one grammar.
    """
    size = int(vocab_size)
    compiler = GrammarCompiler(Tokenizer.from_file(tokenizer), size, frozenset(map(int, end_ids)))
    bits = np.zeros((1, (size + 31) // 32), dtype="<i4")
    threading.stack_size(_TRIAL_STACK_BYTES)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def test_line(line: str) -> None:
        request = json.loads(line)
        problem = ""
        try:
            if "kind" in request:  # the first request only waits for the start
                grammar = Grammar(kind=request["kind"], text=request["text"])
                compiler.start(grammar).allow_next(bits, 0)
        except RecursionError:
            problem = _LIMIT_EXCEEDED
        except ValueError as error:
            problem = str(error)
        sys.stdout.write(json.dumps({"id": request["id"], "problem": problem}) + "\n")
        sys.stdout.flush()

    for line in sys.stdin:
        compiling = threading.Thread(target=test_line, args=(line,))
        compiling.start()
        compiling.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
