"""A task set of verifiers': sums, with a reward of two parts and a metric."""

from collections.abc import Iterator

import verifiers.v1 as vf  # type: ignore[import-not-found]


class SumData(vf.TaskData):  # type: ignore[misc]
    """A sum."""

    answer: str


class SumTask(vf.Task[SumData]):  # type: ignore[misc]
    """Judges the reply."""

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        """Whether the reply is the sum."""
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def short(self, trace: vf.Trace) -> float:
        """Whether the reply is short."""
        return float(len(trace.last_reply) < 4)

    @vf.metric  # type: ignore[untyped-decorator]
    async def length(self, trace: vf.Trace) -> float:
        """How long the reply is."""
        return float(len(trace.last_reply))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):  # type: ignore[misc]
    """Sums."""

    def load(self) -> Iterator[SumTask]:
        """Yield them."""
        for n in range(1000):
            yield SumTask(SumData(prompt=f"{n} + 1 = ?", answer=str(n + 1)), self.config.task)


__all__ = ["SumTaskset"]
