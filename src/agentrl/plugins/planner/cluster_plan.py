"""`agentrl plan`: does a configuration fit a cluster, and what limits it?

Input: a configuration and a cluster, neither of which needs to exist yet. Output: a plan, as text
and as JSON. The trainer's memory is measured by running its own code on tensors without storage
(`rehearsals`); the rest is arithmetic on shapes and on the rates below.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.config.sections import RootConfig
from agentrl.config.validation.checks import groups_per_step
from agentrl.errors import ConfigError
from agentrl.models.checkpoints.architectures import raw_config
from agentrl.plugins.planner.cluster import GB, Cluster
from agentrl.plugins.planner.rehearsals import RankMemory, rehearsed_rank
from agentrl.plugins.planner.served_model import BYTES_OF_VALUE, ServedModel, Servers, served_model

TRAINER_SHARE, COMPILED_SHARE = 0.24, 0.32
"""Fractions of a GPU's peak that training reaches without and with `--torch_compile`: 4 billion
parameters on an H200, paths of 16,384 tokens (`benchmarks/results/tree_cuda.json`)."""
SAMPLER_MS, MONGOD_MS = 1.9, 1.0
"""CPU time of a turn if a sampler runs 32 rollouts concurrently (`benchmarks/turn_cost.py`)."""
_MAX_CORE_LOAD = 0.7
"""Largest share of a core that one process should use."""


@dataclass(frozen=True)
class Workload:
    """Typical size of a record; only times and loads depend on it."""

    turns: float
    """Model calls per record."""
    tokens: int
    """Tokens of a finished record; half of them are sampled."""


@dataclass(frozen=True)
class ClusterPlan:
    """The predicted memory use and pace of a run."""

    config: RootConfig
    cluster: Cluster
    workload: Workload
    rank: RankMemory
    served: ServedModel

    @property
    def servers(self) -> Servers:
        """The servers of the run."""
        return Servers(self.config.inference, self.cluster, self.served, self.workload.tokens)

    @property
    def problems(self) -> tuple[str, ...]:
        """The parts that do not fit."""
        return tuple(self._problems())

    @property
    def slows_down(self) -> str | None:
        """The bottleneck that keeps the run from this pace."""
        num_cores = self._num_cores(SAMPLER_MS + MONGOD_MS)
        if num_cores <= self.cluster.cores:
            return None
        return (
            f"samplers and mongod need {num_cores:.0f} cores, and the machine has "
            f"{self.cluster.cores}; start samplers on other machines (docs/deploy.md)"
        )

    @property
    def rank_words(self) -> str:
        """Memory that a rank needs and has, as text."""
        return f"a trainer rank needs {_gb(self.rank.peak)}, and has {_gb(self._device_bytes)}"

    @property
    def note(self) -> str:
        """What fits, in one line."""
        return f"memory: {self.rank_words}"

    def parts(self) -> dict[str, Any]:
        """Return the plan as a JSON object; sizes are in bytes, times in seconds."""
        return {
            "fits": not self.problems,
            "problems": list(self.problems),
            "slows_down": self.slows_down,
            "trainer": {
                **asdict(self.rank),
                "ranks": self.config.trainer.num_processes,
                "device_bytes": self._device_bytes,
                "step_flops": self.step_flops,
                "seconds": self.train_seconds,
            },
            "servers": {
                **asdict(self.served),
                "servers": self.servers.count,
                "cache_bytes": self.servers.cache_bytes,
                "cached_tokens": self.servers.cached_tokens,
                "conversations": self.servers.conversations,
                "tokens_per_second": self.servers.tokens_per_second,
                "seconds": self.sample_seconds,
            },
            "publish": {"bytes": self._published_bytes, "seconds": self.publish_seconds},
            "step": {"seconds": self.step_seconds, "records": self._records},
            "run": {
                "steps": self.config.trainer.max_steps,
                "hours": self.run_hours,
                "gpu_hours": self.gpu_hours,
            },
            "turns_per_second": self.turns_per_second,
            "mongod_cores": self._num_cores(MONGOD_MS),
            "sampler_cores": self._num_cores(SAMPLER_MS),
            "samplers": self.samplers,
        }

    def lines(self) -> Iterator[str]:
        """Yield the plan as text lines; the most important come last, next to the prompt."""
        rank, trainer = self.rank, self.config.trainer
        gpu = self.cluster.gpu
        yield f"trainer: {trainer.num_processes} rank(s) on {'CPU' if gpu is None else gpu.name}"
        states = f"gradients {_gb(rank.gradients)}, AdamW {_gb(rank.optimizer)}"
        yield f"  weights {_gb(rank.weights)}, {states}"
        yield f"  activations {_gb(rank.activations)}, peak {_gb(rank.peak)}"
        host = f"; {_gb(rank.host)} in host memory" if rank.host else ""
        yield f"  of {_gb(self._device_bytes)} per rank{host}"
        gpus = f"of {self.config.inference.inf_tp_size} GPU(s)"
        yield f"servers: {self.servers.count} {gpus if self.servers.gpu else 'on the CPU'}"
        cache = f"cache {self.served.cache_per_token / 1024:.0f} KiB per token"
        yield f"  weights {_gb(self.served.weights)}, {cache}"
        conversations = f"{self.servers.conversations} conversations at a time"
        yield f"  cache for {self.servers.cached_tokens:,} tokens, {conversations}"
        if self.train_seconds and self.sample_seconds:
            yield from self._times()
        if self.slows_down is not None:
            yield f"slower because of: {self.slows_down}"
        for problem in self.problems:
            yield f"DOES NOT FIT: {problem}"
        if not self.problems:
            yield "fits"

    def _times(self) -> Iterator[str]:
        workload, load = self.workload, f"{self.samplers} sampler(s)"
        yield (
            f"one step of {self._records} records with {workload.tokens:,} tokens each in "
            f"{workload.turns:g} turns, without shared prefixes:"
        )
        operations = f"{self.step_flops:.2g} FLOPs at {self._trainer_share:.0%} of the peak"
        yield f"  trainer {self.train_seconds:.0f} s ({operations})"
        yield f"  servers {self.sample_seconds:.0f} s ({self.servers.tokens_per_second:,.0f} tokens/s)"
        yield f"  publishing {self.publish_seconds:.1f} s ({_gb(self._published_bytes)})"
        load += f", {self._num_cores(MONGOD_MS):.2g} cores of mongod"
        yield f"  together {self.step_seconds:.0f} s, {self.turns_per_second:.1f} turns/s: {load}"
        yield (
            f"--max_steps {self.config.trainer.max_steps}: {self.run_hours:,.1f} h, "
            f"{self.gpu_hours:,.1f} GPU hours"
        )

    @property
    def _device_bytes(self) -> int:
        """Memory available to a rank."""
        if self.cluster.gpu is not None:
            inference = self.config.inference
            servers = inference.inf_mem_ratio if inference.share_gpus else 0
            return self.cluster.gpu_bytes - int(servers * (self.cluster.gpu.memory_mib << 20))
        return self.cluster.host_bytes // self._ranks_per_host

    @property
    def _ranks_per_host(self) -> int:
        return self.config.trainer.num_processes

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation."""
        return self.config.sampling.max_prompt_tokens + self.config.sampling.max_new_tokens

    @property
    def _records(self) -> int:
        config, trainer = self.config, self.config.trainer
        ranks_per_share = trainer.cp_size * trainer.tp_size * trainer.pp_size
        num_shares = trainer.num_processes // ranks_per_share
        return groups_per_step(config, num_shares) * config.data.num_generations

    @property
    def step_flops(self) -> float:
        """Operations of a step without shared prefixes; merged training needs fewer."""
        tokens = self.workload.tokens
        flops = self.rank.flops_per_token * tokens + self.rank.flops_per_pair * tokens**2 / 2
        return self._records * (flops + self.rank.flops_per_head_position * tokens / 2)

    @property
    def train_seconds(self) -> float:
        """Seconds of the forward and backward passes of a step."""
        if self.cluster.gpu is None:
            return 0.0
        rate = self.cluster.gpu.tflops * 1e12 * self._trainer_share
        recomputed = 4 / 3 if self.config.trainer.gradient_checkpointing else 1
        return recomputed * self.step_flops / rate / self.config.trainer.num_processes

    @property
    def sample_seconds(self) -> float:
        """Seconds that the servers need to sample the tokens of a step."""
        if not self.servers.tokens_per_second:
            return 0.0
        return self._records * self.workload.tokens / 2 / self.servers.tokens_per_second

    @property
    def _trainer_share(self) -> float:
        return COMPILED_SHARE if self.config.trainer.torch_compile else TRAINER_SHARE

    @property
    def _published_bytes(self) -> int:
        if self.config.model.lora_rank:
            return self.rank.num_trained * BYTES_OF_VALUE
        return self.rank.num_parameters * BYTES_OF_VALUE

    @property
    def publish_seconds(self) -> float:
        """Seconds that the weights need to cross the network once."""
        return self._published_bytes / GB / self.cluster.network_gb_per_second

    @property
    def step_seconds(self) -> float:
        """Seconds from one policy to the next: sampling continues while the trainer computes."""
        seconds = (self.train_seconds, self.sample_seconds)
        return (sum if self.config.inference.colocated else max)(seconds) + self.publish_seconds

    @property
    def run_hours(self) -> float:
        """Hours of `max_steps` steps, without evaluations and the start."""
        return self.config.trainer.max_steps * self.step_seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """Hours that all GPUs of the run are reserved for."""
        return self.run_hours * (self.config.run.num_gpus or 0)

    @property
    def turns_per_second(self) -> float:
        """Model calls per second of all samplers."""
        if not self.train_seconds:
            return 0.0
        return self._records * self.workload.turns / self.step_seconds

    def _num_cores(self, milliseconds: float) -> float:
        return self.turns_per_second * milliseconds / 1000

    @property
    def samplers(self) -> int:
        """Number of sampler processes that these turns require."""
        max_rollouts = self.config.rollout.max_concurrent_samples_per_process
        num_conversations = self.servers.count * self.servers.conversations
        return max(
            1,
            -(-num_conversations // max_rollouts),
            -int(-self._num_cores(SAMPLER_MS) // _MAX_CORE_LOAD),
        )

    def _problems(self) -> Iterator[str]:
        rank, cluster = self.rank, self.cluster
        if rank.peak > self._device_bytes:
            yield self.rank_words
        # The memory into which rank 0 exports is page-locked, and stays with it.
        kept = rank.host * self._ranks_per_host + self._published_bytes
        if cluster.gpu is not None and kept > cluster.host_bytes:
            yield (
                f"{self._ranks_per_host} rank(s) keep {_gb(kept)} in host memory, exported weights "
                f"included, and the machine has {_gb(cluster.host_bytes)}"
            )
        if self.served.cache(self.longest) > self.servers.cache_bytes:
            yield (
                f"a server has {_gb(self.servers.cache_bytes)} of cache per GPU, and the longest "
                f"conversation of {self.longest:,} tokens needs "
                f"{_gb(self.served.cache(self.longest))}; raise --inf_tp_size, or lower "
                "--max_prompt_tokens"
            )


def plan_cluster(
    config: RootConfig, model_path: Path, cluster: Cluster, workload: Workload | None = None
) -> ClusterPlan:
    """Rehearse the trainer's step and compute the rest."""
    rank = rehearsed_rank(config, model_path, on_gpu=cluster.gpu is not None)
    served = planned_server(config, model_path, rank)
    return ClusterPlan(config, cluster, workload or usual_workload(config), rank, served)


def usual_workload(config: RootConfig, turns: float = 4, tokens: int | None = None) -> Workload:
    """Return a workload; by default, records have half the length of the longest conversation."""
    longest = config.sampling.max_prompt_tokens + config.sampling.max_new_tokens
    return Workload(turns, tokens or longest // 2)


def planned_server(config: RootConfig, model_path: Path, rank: RankMemory) -> ServedModel:
    """Return the memory of a server."""
    try:
        return served_model(
            raw_config(model_path), rank.num_parameters, tp_size=config.inference.inf_tp_size
        )
    except KeyError as error:
        raise ConfigError(f"{model_path / 'config.json'} lacks {error}") from None


def _gb(size: float) -> str:
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"
