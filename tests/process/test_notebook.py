"""The notebook in examples/ runs from its first cell to its last, and stores no outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.conftest import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_stores_no_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Jupyter's libraries
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the error of a cell
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(text.startswith("Walker2D: return ") for text in texts)
    assert any(text.startswith("1500 steps: mean return ") for text in texts)
