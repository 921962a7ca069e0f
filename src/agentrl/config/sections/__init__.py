"""The configuration of a run, in sections. Every field is a command-line flag of the same name.

A component receives its own sections, never the whole configuration. Field docstrings are the help
texts of the flags.
"""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from agentrl.config.sections.run_sections import (
    PRIVATE_MONGO_ROOT,
    DataSection,
    ModelSection,
    RunSection,
    StoreSection,
)
from agentrl.config.sections.sampling_sections import (
    AgentSection,
    InferenceSection,
    RolloutSection,
    SamplingSection,
    ToolsSection,
)
from agentrl.config.sections.section import ConfigSection
from agentrl.config.sections.training_sections import (
    AlgorithmSection,
    PublishSection,
    TrainerSection,
)

__all__ = [
    "PRIVATE_MONGO_ROOT",
    "SECTIONS",
    "AgentSection",
    "AlgorithmSection",
    "ConfigSection",
    "DataSection",
    "InferenceSection",
    "ModelSection",
    "PublishSection",
    "RolloutSection",
    "RootConfig",
    "RunSection",
    "SamplingSection",
    "StoreSection",
    "ToolsSection",
    "TrainerSection",
]

SECTIONS: dict[str, type[ConfigSection]] = {
    "run": RunSection,
    "model": ModelSection,
    "store": StoreSection,
    "data": DataSection,
    "sampling": SamplingSection,
    "rollout": RolloutSection,
    "tools": ToolsSection,
    "agents": AgentSection,
    "inference": InferenceSection,
    "algorithm": AlgorithmSection,
    "trainer": TrainerSection,
    "publish": PublishSection,
}


class RootConfig(BaseModel):
    """All sections together: what one process was started with."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    store: StoreSection = StoreSection()
    data: DataSection = DataSection()
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    tools: ToolsSection = ToolsSection()
    agents: AgentSection = AgentSection()
    inference: InferenceSection = InferenceSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    trainer: TrainerSection = TrainerSection()
    publish: PublishSection = PublishSection()

    @property
    def private_mongo_dir(self) -> Path:
        """Where the run's private mongod keeps its data."""
        return self.store.mongo_data_dir or PRIVATE_MONGO_ROOT / self.run.run_name
