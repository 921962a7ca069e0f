"""The notebooks of examples/notebooks run from their first cell to their last."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"
CELL_SECONDS = 400

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def executed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Execute a notebook in a folder; return what its cells printed."""
    # The kernel is that of this interpreter, and keeps its files where the test does.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share/jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    notebook: Any = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.get("text", "") for output in outputs)


def test_the_demo_is_trained_and_its_database_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = executed("train_the_demo", tmp_path, monkeypatch)
    for words in ("step    3/3", "3 reward", "question"):
        assert words in said
    said = executed("look_into_a_run", tmp_path, monkeypatch)
    for words in ("completed at version 3", "score", "version 0:", "'trained':"):
        assert words in said


def test_a_folder_without_the_run_is_named_and_gets_no_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"no run here: .*/mongo/demo"):
        executed("look_into_a_run", tmp_path, monkeypatch)
    assert not (tmp_path / ".agentrl").exists()


def test_a_function_of_a_cell_is_trained_and_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = executed("train_a_function", tmp_path, monkeypatch)
    for words in ("completed rewards: [", "held out: "):
        assert words in said
