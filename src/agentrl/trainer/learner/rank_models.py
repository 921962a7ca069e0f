"""The models of one rank: the policy and the KL penalty's reference, loaded and divided over the mesh.

Input: the settings, equal on all ranks, and this rank's place. Output: `RankModels`. Independent of
the optimizer and the loss.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from agentrl.distributed import Ranks, Stages, shard_model
from agentrl.errors import ConfigError
from agentrl.models.attention.attention_registry import implementation_of
from agentrl.models.checkpoints.adapter_files import AdapterShape
from agentrl.models.compilation import compile_policy, compiles_layers
from agentrl.models.flops import FlopCount
from agentrl.models.load import load_policy
from agentrl.models.lora import BasePolicy, add_adapter, load_adapter, start_adapter
from agentrl.models.parallel import parallelize
from agentrl.models.policy import PolicyModel
from agentrl.models.router_replay import make_routers_replay
from agentrl.models.stage_layers import keep_stage
from agentrl.models.vision.image_encoders import freeze_encoder
from agentrl.trainer.learner.settings import LearnerSettings, Precision, adapter_shape


@dataclass(frozen=True, eq=False)
class RankModels:
    """The models of a rank."""

    policy: PolicyModel
    reference: nn.Module | None
    """The KL penalty's reference model, if there is one."""
    stages: Stages | None
    """The pipeline that both are a stage of, if there is one."""
    flops: FlopCount
    """Costs of the whole policy."""
    precision: Precision

    @classmethod
    def load(cls, settings: LearnerSettings, ranks: Ranks) -> Self:
        """Load and divide the models (collective)."""
        model, weights, algorithm = settings.model, settings.weights, settings.algorithm
        precision = Precision.of(model.torch_dtype, ranks.device)
        if model.attention_implementation == "varlen" and not precision.is_mixed:
            raise ConfigError(
                "--attention_implementation varlen computes in bfloat16; give --torch_dtype "
                "bfloat16, or use flex or sdpa"
            )
        adapter = adapter_shape(model)
        loader = _Loader(settings, ranks, ranks.build_mesh(), precision)
        policy, flops = loader.load(
            weights.model_path,
            # With an adapter, all base weights are frozen, so no master copy is needed.
            dtype=precision.master if adapter is None else precision.compute,
            adapter=adapter,
            gradient_checkpointing=settings.trainer.gradient_checkpointing,
        )
        if weights.adapter_path is not None:
            load_adapter(policy, weights.adapter_path)
        elif adapter is not None:
            start_adapter(policy, settings.seed)
        reference: nn.Module | None = None
        if settings.reference_path is not None:
            loaded, _ = loader.load(settings.reference_path, dtype=precision.master)
            reference = loaded.requires_grad_(requires_grad=False)
        elif algorithm is not None and algorithm.kl_coefficient and adapter is not None:
            reference = BasePolicy(policy)
        return cls(policy, reference, loader.stages_of(policy), flops, precision)


@dataclass(frozen=True, eq=False)
class _Loader:
    settings: LearnerSettings
    ranks: Ranks
    mesh: DeviceMesh | None
    precision: Precision

    def load(
        self,
        path: Path,
        *,
        dtype: torch.dtype,
        adapter: AdapterShape | None = None,
        gradient_checkpointing: bool = False,
    ) -> tuple[PolicyModel, FlopCount]:
        """Return a divided model, and the costs of the whole."""
        model, trainer = self.settings.model, self.settings.trainer
        counts: list[FlopCount] = []

        def prepare(policy: PolicyModel) -> None:
            if model.router_replay:
                make_routers_replay(policy.model)
            if not model.train_vision:
                freeze_encoder(policy.model)
            if adapter is not None:
                add_adapter(policy.model, adapter, dtype=self.precision.master)
            counts.append(FlopCount.of(policy))  # a stage holds only some of the layers
            if self.mesh is not None:
                pp = self.mesh["pp"]
                policy.stage = keep_stage(policy.model, pp.get_local_rank(), pp.size())
            parallelize(policy, self.mesh)
            shard_model(
                policy,
                self.ranks,
                self.mesh,
                compute_dtype=self.precision.compute,
                cpu_offload=trainer.cpu_offload,
            )

        attention: str | None = implementation_of(model.attention_implementation)
        if trainer.merge == "none" and self.ranks.shape.cp == 1:
            attention = None
        policy = load_policy(
            path,
            dtype=dtype,
            device=self.ranks.device,
            attention=attention,
            trust_remote_code=model.trust_remote_code,
            gradient_checkpointing=gradient_checkpointing,
            prepare=prepare,
            cpu_offload=trainer.cpu_offload or self.settings.starts_in_host_memory,
        )
        if compiles_layers(trainer, self.ranks.device, self.precision.compute):
            compile_policy(policy, self.ranks.device)
        return policy, counts[0]

    def stages_of(self, policy: PolicyModel) -> Stages | None:
        """Return the stages of the pipeline, if there is one."""
        if self.mesh is None or self.ranks.shape.pp == 1:
            return None
        return Stages(
            self.mesh["pp"],
            self.ranks.device,
            width=policy.model.config.get_text_config().hidden_size,
            dtype=self.precision.compute,
        )
