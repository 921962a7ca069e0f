"""The functions of docs/own-algorithm.md pass the trial of a run."""

import re
from pathlib import Path

from agentrl.algorithms.losses import LossInputs
from agentrl.config.sections import AlgorithmSection, RootConfig, TrainerSection
from agentrl.trainer.learner.function_trial import try_functions

PAGE = (Path(__file__).parents[3] / "docs" / "own-algorithm.md").read_text()


def test_the_functions_of_the_page_pass_the_trial(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    algorithm = AlgorithmSection(
        loss_calculator=f"{path}:loss",
        loss_args={"bound": 3.0},
        advantage_estimator=f"{path}:advantages",
        group_filter=f"{path}:keep",
    )
    trainer = TrainerSection(lr_scheduler_type=f"{path}:rate", on_step=f"{path}:after")
    try_functions(RootConfig(algorithm=algorithm, trainer=trainer))
    of_trees = algorithm.model_copy(update={"advantage_estimator": f"{path}:credits"})
    try_functions(RootConfig(algorithm=of_trees))


def test_the_page_describes_every_input_of_a_loss() -> None:
    for name in LossInputs.__dataclass_fields__:
        assert f"`{name}`" in PAGE
