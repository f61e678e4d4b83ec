"""Runs the code of the pages in docs/ and of notebooks/, and writes down what it prints. Run by `make docs-output`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import nbformat

from tests.docs import notebooks, pages
from tests.docs.warm import Warm


def main() -> None:
    with Warm() as warm:
        for page in pages.PAGES:
            if not pages.blocks(page):
                continue
            before = page.read_text("utf-8")
            after = pages.rewritten(page, warm.run(page))
            page.write_text(after, "utf-8")
            print(f"{page.name}: {'rewritten' if after != before else 'as it was'}")
    for notebook in notebooks.NOTEBOOKS:
        nbformat.write(notebooks.run(notebook), notebook)
        print(f"{notebook.name}: rewritten")


if __name__ == "__main__":
    main()
