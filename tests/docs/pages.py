"""The pages of docs/ as programs: their code is run in order and what it prints is compared or written back.

A fenced block marked `python` is run, in one namespace for the page; the block marked `text` right after
it is what it prints. A block whose text begins with `Traceback` has to fail, and the traceback is what it
prints. A block marked `sh` that begins with `curl` is run too, by a shell. `<!-- not run: reason -->` on the line
before a block leaves it out, `<!-- run with: library -->` where that is not installed (the extra `peers`).
"""

from __future__ import annotations

import contextlib
import linecache
import re
import subprocess
import tempfile
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(
    r"(?P<skip><!-- not run:[^\n]*-->\n)?(?:<!-- run with: (?P<library>\w+) -->\n)?"
    r"^```(?P<language>python|sh(?=\ncurl))\n(?P<code>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    number: int
    code: str
    output: str | None
    """What the page says that it prints; None where the page shows nothing."""
    span: tuple[int, int]
    """Where that is in the page."""
    language: str = "python"

    @property
    def fails(self) -> bool:
        return (self.output or "").startswith("Traceback")


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that are run."""
    written = FENCE.finditer(page.read_text("utf-8"))
    found = [match for match in written if not match["skip"] and (not match["library"] or find_spec(match["library"]))]
    return [
        Block(number, match["code"], match["output"], match.span("output"), match["language"])
        for number, match in enumerate(found, 1)
    ]


def libraries(page: Path) -> set[str]:
    """Those of others whose code the page has, to be run where they are installed."""
    return {match["library"] for match in FENCE.finditer(page.read_text("utf-8")) if match["library"]}


def rewritten(page: Path, outputs: list[str]) -> str:
    """The text of the page with each shown output replaced by the real one."""
    text = page.read_text("utf-8")
    for block, output in reversed(list(zip(blocks(page), outputs, strict=True))):
        if block.output is not None:
            start, stop = block.span
            text = text[:start] + output + text[stop:]
    return text


def run_here(page: Path) -> list[str]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    return [_run_block(block, f"<{page.name}, block {block.number}>", namespace) for block in blocks(page)]


def _run_block(block: Block, filename: str, namespace: dict[str, Any]) -> str:
    if block.language == "sh":
        return subprocess.run(["bash", "-c", block.code], check=True, stdout=subprocess.PIPE, text=True).stdout
    linecache.cache[filename] = (len(block.code), None, block.code.splitlines(keepends=True), filename)
    # A real file: vLLM asks standard output for its number.
    with tempfile.TemporaryFile("w+") as printed, contextlib.redirect_stdout(printed):
        try:
            exec(compile(block.code, filename, "exec"), namespace)
        except Exception as error:
            if not block.fails:
                raise
            below = error.__traceback__.tb_next if error.__traceback__ else None
            print("".join(traceback.format_exception(type(error), error, below)), end="")
        else:
            assert not block.fails, f"{filename} was to fail"
        printed.seek(0)
        return printed.read()
