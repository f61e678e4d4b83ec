"""The notebooks as programs: their cells are run by a kernel, and what they print is compared or written back.

Pictures and the page's own displays are kept in the files and not compared: they differ between versions of matplotlib.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from insitu import demo_model
from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def run(notebook: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs; the first cell that fails raises ``CellExecutionError``."""
    read = nbformat.read(notebook, as_version=4)
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    done = NotebookClient(read, timeout=280, kernel_name="python3").execute(cwd=str(ROOT))
    for cell in _code(done):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.execution_count = None
        cell.metadata = nbformat.NotebookNode()
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output["execution_count"] = None
            for kind in output.get("data", {}):
                output.data[kind] = output.data[kind].replace(demo_model(), "MODEL")
    return done


def printed(notebook: nbformat.NotebookNode) -> list[str]:
    """What each cell with code prints."""
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in _code(notebook)]


def _code(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]
