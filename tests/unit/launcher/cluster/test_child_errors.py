"""What is quoted of a failed process's log."""

from pathlib import Path

import pytest
from agentrl.launcher.cluster.child_errors import last_error

from agentrl.runtime.processes.child_processes import Child

LAUNCHERS_REPORT = """\
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
agentrl FAILED
------------------------------------------------------------
  exitcode  : 1 (pid: 7)
  error_file: <N/A>
============================================================
"""


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("step 1\nagentrl train: no space left\n", "agentrl train: no space left"),
        (f"agentrl train: no space left\n{LAUNCHERS_REPORT}", "agentrl train: no space left"),
        (
            f"[rank0]: Traceback\n[rank0]: RuntimeError: it closed\n{LAUNCHERS_REPORT}",
            "RuntimeError: it closed",
        ),
        ("ValueError: old\ntorch.OutOfMemoryError: big\n", "torch.OutOfMemoryError: big"),
        ("Killed\n", "Killed"),
        ("  + Exception Group Traceback\n    | KeyError: 'key'\n    +------\n", "KeyError: 'key'"),
    ],
)
def test_the_reason_is_quoted_and_not_the_launchers_report(
    tmp_path: Path, log: str, said: str
) -> None:
    path = tmp_path / "train_0.log"
    path.write_text(log)
    assert last_error(Child("train_0", [], path)) == said
