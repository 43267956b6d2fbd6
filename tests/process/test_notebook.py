"""The notebook in examples/ runs from its first cell to its last, and stores no outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

import td3_robot as tr
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
@pytest.mark.filterwarnings("ignore")  # Jupyter's libraries cause warnings
def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    manager = client.create_kernel_manager()
    # With TCP, another program can take a port before the kernel binds it.
    manager.transport, manager.ip = "ipc", str(tmp_path / "k")
    client.execute()  # raises the error if a cell fails
    texts = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any(text.startswith("Walker2D: return ") for text in texts)
    assert any(text.startswith("1500 steps: mean return ") for text in texts)


TRAIN = """
import td3_robot as tr
tr.train(
    "pendulum", out="run", progress=False, callback=lambda state: print(state.updates, flush=True),
    overrides={"learner.learning_starts": 100, "learner.precision": "fp32", "learner.compile": False},
)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Jupyter's libraries cause warnings
def test_interrupting_the_kernel_stops_the_training_and_keeps_the_policy(tmp_path: Path) -> None:
    """Jupyter's button "interrupt" sends SIGINT to the kernel."""
    manager = pytest.importorskip("jupyter_client.manager").KernelManager(transport="ipc", ip=str(tmp_path / "k"))
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=120)
        client.execute(TRAIN)
        printed = ""
        while max(map(int, printed.split()), default=0) < 50:
            printed += client.get_iopub_msg(timeout=120)["content"].get("text", "")
        manager.interrupt_kernel()
        while (message := client.get_iopub_msg(timeout=120))["msg_type"] != "error":
            pass
        assert message["content"]["ename"] == "KeyboardInterrupt"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert tr.load_policy(tmp_path / "run").spec.action_size == 1
