"""The pages say what the code does: every block runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.warm import Warm

RUNNABLE = [page for page in pages.PAGES if pages.blocks(page)]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[dict[Path, Future[list[str]]]]:
    """The pages that are asked for, two processes of tests at a time: a page's engine starts on one core."""
    name = test_page_prints_what_it_shows.__name__
    chosen = [item.callspec.params["page"] for item in request.session.items if item.originalname == name]
    started = threading.local()

    def run(page: Path) -> list[str]:
        if not hasattr(started, "warm"):
            started.warm = processes.enter_context(Warm())
        return started.warm.run(page)

    together = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    with ExitStack() as processes, ThreadPoolExecutor(together) as pool:
        yield {page: pool.submit(run, page) for page in chosen}
        pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_page_prints_what_it_shows(page: Path, running: dict[Path, Future[list[str]]]) -> None:
    outputs = running[page].result()
    shown = [block.output or "" for block in pages.blocks(page)]
    assert outputs == shown, "`make docs-output` writes down what the code prints"
    assert str(pages.ROOT) not in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("page", "library"), [(page, library) for page in pages.PAGES for library in sorted(pages.libraries(page))]
)
def test_code_of_other_libraries_is_run_too(page: Path, library: str) -> None:
    if not find_spec(library):
        pytest.skip(f"{library} is not installed: `pip install -e .[peers]` adds it")
    assert any(library in block.code for block in pages.blocks(page))


def test_pages_with_code_are_found() -> None:
    assert {"walkthrough.md", "errors.md"} <= {page.name for page in RUNNABLE}


@pytest.mark.parametrize("page", [*pages.PAGES, pages.ROOT / "README.md"], ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text("utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_example_of_the_readme_is_that_of_the_first_page() -> None:
    example = re.compile(r"```python\n(.*?)```", re.DOTALL)
    readme = example.search((pages.ROOT / "README.md").read_text("utf-8"))
    index = example.search((pages.ROOT / "docs" / "index.md").read_text("utf-8"))
    assert readme
    assert index
    assert readme[1] == index[1]


def test_a_page_is_run_and_written_back(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n```python\nx = 1\nprint(x)\n```\n\n```text\nold\n```\n"
        "<!-- not run: an example -->\n```python\nnonsense(\n```\n"
        "```python\nx += 1\n```\n"
        "```python\nraise ValueError(x)\n```\n\n```text\nTraceback\n```\nEnd\n"
    )
    with Warm() as warm:
        outputs = warm.run(page)
        assert outputs[:2] == ["1\n", ""]
        assert outputs[2] == (
            "Traceback (most recent call last):\n"
            '  File "<page.md, block 3>", line 1, in <module>\n'
            "    raise ValueError(x)\n"
            "ValueError: 2\n"
        )
        page.write_text(pages.rewritten(page, outputs))
        assert "```text\n1\n```\n" in page.read_text()
        assert page.read_text().endswith("ValueError: 2\n```\nEnd\n")
        assert warm.run(page) == outputs
