"""Computes the load of each part of a run on 8 to 4,096 GPUs, and the first bottleneck.

Input: the costs that other benchmarks measured (`costs`), the plan of `agentrl plan` for a model on a
GPU model (`Planned`), and a workload. Output: a `Size`. This module measures nothing.

The trainer reads a step's records, builds its batch, computes and publishes in sequence; the servers
sample concurrently, and pause while they load weights. The GPUs are divided so that computing and
sampling take the same time. The rest of the trainer's cycle is overhead, during which its GPUs wait.
A group takes as long as its slowest rollout, and the bound on staleness limits the number of
concurrent groups, which limits the steps per second, too.
"""

import functools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (8, 32, 128, 512, 2048, 4096)
LARGEST_BATCH_GPUS = 256
"""The batch grows with the number of GPUs up to this number; a larger one would not learn better."""
GROUP, STALENESS = 8, 3
"""`--num_generations`, `--max_staleness`."""
ROLLOUTS_PER_SAMPLER = 256
"""`--max_concurrent_samples_per_process`."""
BUCKET_BYTES = 256 << 20
"""`weight_sync_bucket_mb`: every server receives one call per bucket."""
NETWORK_BYTES = 10e9
"""Bytes per second from the trainer to a server, as `agentrl plan` assumes."""
SHARED_DISK_BYTES = 50e9
"""Bytes per second that all servers together read from a shared file system."""
PRIMARY_CORES = 16
"""Cores of the machine of MongoDB's primary."""
BUSY = 0.7
"""Maximum load of a core, or of a primary, that the model assumes."""
WAITING = 0.1
"""Maximum share of a step that the GPUs should wait for publishing, or for rank 0."""
PARTS = ("staleness", "rank 0", "publishing", "mongod", "claims")
"""Possible bottlenecks of a run besides its GPUs."""
_LIST_SECONDS, _SERVER_BEAT_SECONDS, _SAMPLER_BEAT_SECONDS, _RENEWAL_SECONDS = 1.0, 1.0, 2.0, 10.0
"""Intervals of a process: `LoopTimes`, `BEAT_SECONDS`, a third of `lease_seconds`."""
_CONTROL_CALLS, _STATUS_WRITES = 4, 2
"""Numbers per publication and server, in addition to the calls for the buckets."""


@dataclass(frozen=True)
class Workload:
    """Properties of the questions."""

    tokens: int
    """Tokens of a complete record; half of them are sampled."""
    turns: float
    records_per_gpu: int = 32
    """Records of a step."""
    tools: float = 1.0
    """Ratio of the tools' seconds to those of the trace."""


def rollout_of(record_id: str) -> list[tuple[int, float]]:
    """Return the turns of a heavy-tailed rollout: sampled tokens, and seconds of the tools."""
    rng = random.Random(record_id)
    return [
        (
            min(4096, max(16, int(rng.lognormvariate(5.6, 1.0)))),
            min(60.0, rng.lognormvariate(1.0, 1.0)),
        )
        for _ in range(1 + min(24, int(rng.expovariate(1 / 4))))
    ]


_SAMPLE = [rollout_of(f"train/0/{number // GROUP}/{number % GROUP}") for number in range(4000)]
TRACE = Workload(
    tokens=2 * sum(tokens for rollout in _SAMPLE for tokens, _ in rollout) // len(_SAMPLE),
    turns=sum(map(len, _SAMPLE)) / len(_SAMPLE),
)
"""The mean of such rollouts."""
WORKLOADS = {
    "agent": Workload(16_384, 10),
    # Batches with as many tokens, and fast tools.
    "short": Workload(2048, 4, records_per_gpu=256, tools=0.05),
}


@functools.cache
def trace_group_seconds(token_seconds: float, tools: float) -> float:
    """Return the mean time of the trace's groups; a group takes as long as its slowest rollout."""
    seconds = [
        sum(tokens * token_seconds + waiting * tools for tokens, waiting in rollout)
        for rollout in _SAMPLE
    ]
    slowest = [max(seconds[first : first + GROUP]) for first in range(0, len(seconds), GROUP)]
    return sum(slowest) / len(slowest)


@dataclass(frozen=True)
class Planned:
    """The plan of `agentrl plan` for a model on a GPU model."""

    model: str
    gpu: str
    trainer_seconds: float
    """GPU seconds of training per record."""
    tokens_per_second: float
    """Rate of a server with one GPU."""
    conversations: int
    """Number that a server decodes concurrently."""
    weight_bytes: int


@dataclass(frozen=True)
class Costs:
    """Costs measured on this machine; milliseconds are CPU time."""

    sampler_ms: float
    mongod_ms: float
    """Cost of a turn, with its share of a record's claim, end, score and completion."""
    list_mongod_ms: tuple[float, float]
    """Cost of reading all servers: the base, and the cost per server."""
    list_sampler_ms: tuple[float, float]
    server_beat_ms: float
    sampler_beat_ms: float
    renewal_ms: float
    claims_per_second: float
    """Rate of one primary, when all samplers compete for the same slots."""
    control_call_ms: float
    status_write_ms: float
    """Cost on rank 0."""
    read_bytes_per_second: float
    """Rate at which the trainer reads."""
    bytes_per_token: float
    prepare_ms: float
    """Cost on rank 0 per record of this workload."""
    broadcast_ratio: float
    """Ratio of a publication's time to the transfer time of its bytes."""


def costs(workload: str, results: Path = RESULTS) -> Costs:
    """Return the costs from the committed results."""

    def result(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))

    fleet, store = result("fleet_cost"), result("store")
    most = max(result("turn_cost")["concurrencies"], key=lambda row: row["concurrency"])
    claims = [row for row in store["writes"] if row["work"] == "claims"]
    crowd = max(claims, key=lambda row: row["processes"] * row["in_flight"])
    return Costs(
        sampler_ms=most["sampler_ms"],
        mongod_ms=most["mongod_ms"],
        list_mongod_ms=_line(fleet["service_list"], "mongod_ms"),
        list_sampler_ms=_line(fleet["service_list"], "caller_ms"),
        server_beat_ms=fleet["server_beat"]["mongod_ms"],
        sampler_beat_ms=fleet["sampler_beat"]["mongod_ms"],
        renewal_ms=fleet["renewal"]["mongod_ms"],
        claims_per_second=crowd["store_per_second"],
        control_call_ms=fleet["control_call"]["caller_ms"],
        status_write_ms=fleet["server_beat"]["caller_ms"] / 2,
        read_bytes_per_second=store["trainer_reads"]["store_megabytes_per_second"] * 1e6,
        bytes_per_token=store["bytes_per_token"][-1]["bytes_per_token"],
        prepare_ms=fleet["prepare"][workload],
        broadcast_ratio=result("weight_sync")["broadcast_ratio"],
    )


def _line(rows: dict[str, dict[str, float]], key: str) -> tuple[float, float]:
    """Return base and slope of a cost, from the values for the fewest and the most servers."""
    few, most = min(map(int, rows)), max(map(int, rows))
    slope = (rows[str(most)][key] - rows[str(few)][key]) / (most - few)
    return max(0.0, rows[str(few)][key] - few * slope), slope


@dataclass(frozen=True)
class Size:
    """A run on a number of GPUs."""

    gpus: int
    workload: Workload
    planned: Planned
    costs: Costs

    @property
    def records(self) -> int:
        """Records of a step."""
        return self.workload.records_per_gpu * min(self.gpus, LARGEST_BATCH_GPUS)

    @property
    def _sampling_seconds(self) -> float:
        """Server seconds per record."""
        return self.workload.tokens / 2 / self.planned.tokens_per_second

    @property
    def trainer_gpus(self) -> int:
        """GPUs of the trainer; the others serve."""
        share = self.planned.trainer_seconds / (
            self.planned.trainer_seconds + self._sampling_seconds
        )
        return min(self.gpus - 1, max(1, round(self.gpus * share)))

    @property
    def servers(self) -> int:
        """Servers, with one GPU each."""
        return self.gpus - self.trainer_gpus

    @property
    def compute_seconds(self) -> float:
        """Seconds of a step in which the trainer computes."""
        return self.records * self.planned.trainer_seconds / self.trainer_gpus

    @property
    def sample_seconds(self) -> float:
        """Seconds in which the servers sample a step's records."""
        return self.records * self._sampling_seconds / self.servers

    @property
    def rank0_seconds(self) -> float:
        """Seconds of a step in which rank 0 reads records and builds the batch."""
        num_bytes = self.records * self.workload.tokens * self.costs.bytes_per_token
        reading = num_bytes / self.costs.read_bytes_per_second
        return reading + self.records * self.costs.prepare_ms / 1000

    @property
    def control_seconds(self) -> float:
        """Seconds of a publication in which rank 0 calls the servers and writes their status."""
        calls = _CONTROL_CALLS + math.ceil(self.planned.weight_bytes / BUCKET_BYTES)
        each = calls * self.costs.control_call_ms + _STATUS_WRITES * self.costs.status_write_ms
        return self.servers * each / 1000

    @property
    def publish_seconds(self) -> float:
        """Seconds of a publication by broadcast."""
        return self._sent_seconds * self.costs.broadcast_ratio + self.control_seconds

    @property
    def _sent_seconds(self) -> float:
        return self.planned.weight_bytes / NETWORK_BYTES

    @property
    def disk_seconds(self) -> float:
        """Seconds in which all servers read the weights from a shared file system."""
        return self.planned.weight_bytes * self.servers / SHARED_DISK_BYTES

    @property
    def group_seconds(self) -> float:
        """Seconds of a group on fully loaded servers: those of the trace, scaled by turns per record."""
        token_seconds = self.planned.conversations / self.planned.tokens_per_second
        # Turns of this workload may be longer or shorter than the trace's.
        length = self.workload.tokens / self.workload.turns / (TRACE.tokens / TRACE.turns)
        rounds = self.workload.turns / TRACE.turns
        return trace_group_seconds(token_seconds * length, self.workload.tools) * rounds

    @property
    def step_seconds(self) -> float:
        """Seconds from one version to the next."""
        training = self.rank0_seconds + self.compute_seconds + self.publish_seconds
        sampling = self.sample_seconds + self.publish_seconds
        return max(training, sampling, self.group_seconds / (STALENESS + 1))

    @property
    def idle_share(self) -> float:
        """Share of the time in which the trainer's GPUs do not compute."""
        return 1 - self.compute_seconds / self.step_seconds

    @property
    def rollouts_per_second(self) -> float:
        """Rollouts per second of the whole run."""
        return self.records / self.step_seconds

    @property
    def pace(self) -> float:
        """Rollouts per second if nothing but the GPUs limited the run."""
        return self.records / max(self.compute_seconds, self.sample_seconds)

    @property
    def _turns_per_second(self) -> float:
        return self.pace * self.workload.turns

    @property
    def conversations(self) -> int:
        """Number of concurrent rollouts that keeps the servers busy."""
        return self.servers * self.planned.conversations

    @property
    def samplers(self) -> int:
        """Sampler processes, with one core each."""
        listing = _at(self.costs.list_sampler_ms, self.servers) / 1000 / _LIST_SECONDS
        cores = self._turns_per_second * self.costs.sampler_ms / 1000
        at_once = self.conversations / ROLLOUTS_PER_SAMPLER
        return max(1, math.ceil(at_once), math.ceil(cores / (BUSY - listing)))

    @property
    def turn_cores(self) -> float:
        """Cores of the primary that turns use."""
        return self._turns_per_second * self.costs.mongod_ms / 1000

    @property
    def fleet_cores(self) -> float:
        """Cores of the primary that the periodic calls of servers and samplers use."""
        lists = self.samplers * _at(self.costs.list_mongod_ms, self.servers) / _LIST_SECONDS
        beats = self.servers * self.costs.server_beat_ms / _SERVER_BEAT_SECONDS
        reports = self.samplers * self.costs.sampler_beat_ms / _SAMPLER_BEAT_SECONDS
        renewals = self.conversations * self.costs.renewal_ms / _RENEWAL_SECONDS
        return (lists + beats + reports + renewals) / 1000

    @property
    def loads(self) -> dict[str, float]:
        """Required rate of each part over its maximum; a part above 1 slows the run down."""
        computing = self.records / self.pace
        return {
            "staleness": self.group_seconds / (STALENESS + 1) / computing,
            "rank 0": self.rank0_seconds / computing / WAITING,
            "publishing": self.publish_seconds / computing / WAITING,
            "mongod": (self.turn_cores + self.fleet_cores) / (BUSY * PRIMARY_CORES),
            "claims": self.pace / self.costs.claims_per_second,
        }

    @property
    def fullest(self) -> str:
        """The part with the highest load."""
        return max(self.loads, key=lambda part: self.loads[part])

    @property
    def shards(self) -> int:
        """Number of primaries that the run's pace requires."""
        return math.ceil(max(self.loads["claims"], self.loads["mongod"], 1))

    def row(self) -> dict[str, Any]:
        """Return the figures."""
        whole = (
            "gpus",
            "trainer_gpus",
            "servers",
            "conversations",
            "samplers",
            "fullest",
            "shards",
        )
        parts = ("step", "compute", "sample", "group", "rank0", "publish", "control", "disk")
        rounded = (*(f"{part}_seconds" for part in parts), "rollouts_per_second", "pace")
        cores = {"turns": self.turn_cores, "fleet": self.fleet_cores}
        return {
            **{name: getattr(self, name) for name in whole},
            **{name: round(getattr(self, name), 2) for name in rounded},
            "records_a_step": self.records,
            "idle_share": round(self.idle_share, 4),
            "mongod_cores": {kind: round(number, 3) for kind, number in cores.items()},
            "loads": {part: round(load, 3) for part, load in self.loads.items()},
            "saturated": [part for part, load in self.loads.items() if load > 1],
        }


def _at(line: tuple[float, float], number: int) -> float:
    return line[0] + line[1] * number


def page_row(row: dict[str, Any]) -> str:
    """Return a size as a row of the table in docs/performance.md."""
    cells = [
        f"{row['gpus']:,}",
        f"{row['trainer_gpus']:,} + {row['servers']:,}",
        f"{row['compute_seconds']:.0f}",
        f"{row['step_seconds']:.0f}",
        f"{row['idle_share']:.0%}",
        f"{row['samplers']:,}",
        _short(row["mongod_cores"]["turns"] + row["mongod_cores"]["fleet"]),
        *(_short(row["loads"][part]) for part in PARTS),
        f"{row['shards']}",
    ]
    return f"| {' | '.join(cells)} |"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def assumptions() -> dict[str, float]:
    """Return the values that are assumed rather than measured or planned."""
    return {
        "group": GROUP,
        "max_staleness": STALENESS,
        "largest_batch_gpus": LARGEST_BATCH_GPUS,
        "network_bytes_per_second": NETWORK_BYTES,
        "shared_disk_bytes_per_second": SHARED_DISK_BYTES,
        "primary_cores": PRIMARY_CORES,
        "most_of_a_primary": BUSY,
        "most_waiting_of_a_step": WAITING,
    }
