"""From finished groups to micro-batches: selection, token trees, packing."""

from agentrl.data.batch import MicroBatch, StepBatch, StepStats, build_step, build_training_step
from agentrl.data.rows import TokenTree
from agentrl.data.select import SelectedGroup, normalized_over_step, select_group

__all__ = [
    "MicroBatch",
    "SelectedGroup",
    "StepBatch",
    "StepStats",
    "TokenTree",
    "build_step",
    "build_training_step",
    "normalized_over_step",
    "select_group",
]
