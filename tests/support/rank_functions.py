"""Train with a function that each gloo rank looks for in a folder of its own, as machines do.

    torchrun --nproc_per_node N tests/support/rank_functions.py FOLDER

`FOLDER/RANK` is first on the rank's path. Every rank leaves `FOLDER/RANK.txt` with the error that ended it.
"""

import os
import sys
from pathlib import Path

from agentrl.config.loading import build_config
from agentrl.errors import ConfigError
from agentrl.trainer.rl.training_loop import train

folder = Path(sys.argv[1])
rank = os.environ["RANK"]
sys.path.insert(0, str(folder / rank))
config = build_config(
    {
        "model_name_or_path": str(folder),
        "output_dir": str(folder / "run"),
        "loss_calculator": "rank_loss:loss",
        "num_processes": 2,
    }
)
try:
    train(config)
except ConfigError as error:
    (folder / f"{rank}.txt").write_text(str(error))
