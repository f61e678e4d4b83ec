"""The logit lens as picture and page: what is in the file, and that any token can be drawn."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

from insitu.plots import lens, logit_lens_html, logit_lens_png

ODD = [
    "<b>&",
    "</script>",
    "$x^$",
    " a",
    "\n\n",
    "\t",
    "",
    "東京",
    "שלום",
    "😀",
    "\u200b",
    "\ufffd",
    "\ue000",
]


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def grid(layers: int, tokens: list[str]) -> tuple[list[list[str]], list[list[float]]]:
    probs = [[(y + 1) * (x + 1) / (layers * len(tokens)) for x in range(len(tokens))] for y in range(layers)]
    return [list(tokens) for _ in range(layers)], probs


def pages(layers: int, tokens: list[str]) -> list[list[list[tuple[str, float]]]]:
    cells, probs = grid(layers, tokens)
    return [
        [[(token, p), ("second", p / 2)] for token, p in zip(row, row_probs, strict=True)]
        for row, row_probs in zip(cells, probs, strict=True)
    ]


def test_any_token_is_drawn_without_a_warning(tmp_path: Path) -> None:
    cells, probs = grid(3, ODD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logit_lens_png(tmp_path / "lens.png", ODD, range(3), cells, probs)
    width, height = png_size(tmp_path / "lens.png")
    assert width > 400
    assert height > 100


def test_a_long_prompt_continues_below(tmp_path: Path) -> None:
    sizes = []
    for count in (20, 100):
        tokens = [f" word{i % 10}" for i in range(count)]
        logit_lens_png(tmp_path / "lens.png", tokens, range(4), *grid(4, tokens))
        sizes.append(png_size(tmp_path / "lens.png"))
    (short_width, short_height), (long_width, long_height) = sizes
    assert long_width < 1.5 * short_width
    assert long_height > 3 * short_height


def test_bands_hold_every_position_once_and_are_about_as_wide() -> None:
    widths = [3.0 + position % 7 for position in range(100)]
    bands = lens._bands(widths)
    assert [position for band in bands for position in band] == list(range(100))
    used = [sum(widths[band.start : band.stop]) for band in bands]
    assert max(used) < lens.BAND + max(widths)
    assert max(used) - min(used) < 3 * max(widths)


def test_leaves_the_users_matplotlib_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from insitu.plots import logit_lens_png\n"
        f"logit_lens_png({str(tmp_path / 'lens.png')!r}, ['a'], ['only'], [['b']], [[0.5]])\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert png_size(tmp_path / "lens.png")[0] > 0


def test_a_grid_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"expected 2 rows of 3 entries .* got 2 rows of 2"):
        logit_lens_png(tmp_path / "lens.png", ["a", "b", "c"], range(2), *grid(2, ["a", "b"]))
    with pytest.raises(ValueError, match="at least one token"):
        logit_lens_html(tmp_path / "lens.html", [], range(2), [[], []])
    assert list(tmp_path.iterdir()) == []


class Page(HTMLParser):
    """The text of a page's cells, its data, and every address that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.data = ""
        self.fetched: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = "data" if ("id", "data") in attrs else tag
        self.fetched += [value or "" for name, value in attrs if name in {"src", "href"}]
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.inside == "td":
            self.cells[-1] += data
        if self.inside == "data":
            self.data += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def test_page_shows_tokens_as_text_and_keeps_the_runners_up(tmp_path: Path) -> None:
    path = tmp_path / "lens.html"
    logit_lens_html(path, ODD, ["first", "last"], pages(2, ODD), title="A & B")
    page = Page(path.read_text())
    shown = [
        "<b>&",
        "</script>",
        "$x^$",
        "·a",
        "↵↵",
        "⇥",
        "∅",
        "東京",
        "שלום",
        "😀",
        r"\u200b",
        "\ufffd",
        r"\ue000",
    ]
    assert page.cells == shown * 2
    data = json.loads(page.data)
    assert data["layers"] == ["first", "last"]
    assert data["tokens"] == shown
    assert data["top"][1][0] == [["<b>&", round(1 / len(ODD), 5)], ["second", round(0.5 / len(ODD), 5)]]


def test_page_needs_no_network(tmp_path: Path) -> None:
    path = tmp_path / "lens.html"
    logit_lens_html(path, ["a"], [0], [[[("b", 1.0)]]])
    text = path.read_text()
    assert Page(text).fetched == []
    assert not re.search(r"https?://|@import|url\(", text)


def test_takes_tensors(tmp_path: Path) -> None:
    import torch

    probs = torch.full((2, 1), 0.25)
    logit_lens_png(tmp_path / "lens.png", ["a"], range(2), [["b"], ["c"]], probs)
    logit_lens_html(tmp_path / "lens.html", ["a"], range(2), [[[("b", p)] for p in row] for row in probs])
    assert "--p:0.250" in (tmp_path / "lens.html").read_text()
