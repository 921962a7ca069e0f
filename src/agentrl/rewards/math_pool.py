"""The scorer `math`: mathematical comparison in worker processes (`math_equality`).

The workers are processes because only the kernel can end a comparison that hangs in C code.
"""

import asyncio
import atexit
import os
import queue
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

from agentrl.errors import AgentWorkerError, ScoringError
from agentrl.rewards.factory import MCPScorerFactory, Verdict
from agentrl.runtime.processes.request_process import RequestProcess
from agentrl.schema import GroundTruth

_MAX_ANSWER_CHARS = 10_000
_START_SECONDS = 120.0


class MathPool:
    """Compares answers in child processes, which start on demand and exit with this process."""

    def __init__(self, *, num_workers: int = 2, cpu_seconds: float = 5.0) -> None:
        """Create a pool without processes.

        Args:
            num_workers: maximum number of concurrent comparisons.
            cpu_seconds: CPU time limit of one comparison.
        """
        self._cpu_seconds = cpu_seconds
        # A separate pool: waiting comparisons must not fill the event loop's default executor.
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="math")
        self._idle: queue.SimpleQueue[RequestProcess] = queue.SimpleQueue()
        atexit.register(self.close)

    async def compare(self, answer: str, accepted: tuple[str, ...]) -> Verdict:
        """Return 1 if `answer` equals one of the accepted answers.

        An answer that cannot be compared within the limit counts as wrong.
        """
        if len(answer) > _MAX_ANSWER_CHARS:
            return Verdict(0.0, detail=f"longer than {_MAX_ANSWER_CHARS} characters")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._compare, answer, accepted)

    def close(self) -> None:
        """Wait for running comparisons, then stop all workers."""
        self._threads.shutdown()
        while not self._idle.empty():
            self._idle.get().close()

    def _compare(self, answer: str, accepted: tuple[str, ...]) -> Verdict:
        worker = self._worker()
        request = {"answer": answer, "accepted": accepted, "cpu_seconds": self._cpu_seconds}
        # For a worker that gets no CPU time: its own limit counts CPU time alone.
        seconds = _START_SECONDS + 20 * self._cpu_seconds
        try:
            reply = worker.ask_and_wait(request, seconds)
        except TimeoutError:
            worker.close()
            raise ScoringError(f"the math worker did not reply within {seconds:g} s") from None
        except AgentWorkerError as end:
            if worker.exit_status == -signal.SIGPROF:
                return Verdict(0.0, detail=f"comparison timed out after {self._cpu_seconds:g} s")
            raise ScoringError(str(end)) from None
        self._idle.put(worker)
        if "error" in reply:
            return Verdict(0.0, detail=f"not comparable: {reply['error']}")
        return Verdict(float(bool(reply["correct"])))

    def _worker(self) -> RequestProcess:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            argv = [sys.executable, "-P", "-m", "agentrl.rewards.math_equality"]
            return RequestProcess("the math worker", argv, os.environ)


_pool = MathPool()


@MCPScorerFactory.register_scorer("math", needs_answer=True, compares_text=True)
async def math(answer: str, truth: GroundTruth) -> Verdict:
    """Return 1 if the answer is mathematically equal to a right one (math-verify)."""
    text = answer.strip()
    if any(text == right.strip() for right in truth.accepted):
        return Verdict(1.0)
    return await _pool.compare(text, truth.accepted)
