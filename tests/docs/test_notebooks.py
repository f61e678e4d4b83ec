"""The notebooks do what they show."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.docs import notebooks


@pytest.mark.slow
@pytest.mark.parametrize("notebook", notebooks.NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_prints_what_it_shows(notebook: Path) -> None:
    shown = nbformat.read(notebook, as_version=4)
    assert notebooks.printed(notebooks.run(notebook)) == notebooks.printed(shown), (
        "`make docs-output` writes down what the code prints"
    )


@pytest.mark.parametrize("notebook", notebooks.NOTEBOOKS, ids=lambda notebook: notebook.name)
def test_notebook_is_small_and_of_no_machine(notebook: Path) -> None:
    text = notebook.read_text("utf-8")
    assert len(text) < 300_000
    assert str(notebooks.ROOT) not in text
    assert str(Path.home()) not in text


def test_there_are_notebooks() -> None:
    assert {"logit_lens.ipynb", "patching.ipynb", "steering.ipynb"} <= {each.name for each in notebooks.NOTEBOOKS}
