"""The logit lens as a page: one file that needs no network, with the runners-up on hover."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from insitu.plots.lens import check_grid
from insitu.plots.tokens import shorten, visible


def logit_lens_html(
    path: str | os.PathLike[str],
    tokens: Sequence[str],
    layers: Sequence[Any],
    top: Sequence[Sequence[Sequence[tuple[str, float]]]],
    *,
    title: str = "Logit lens",
) -> None:
    """Writes a page with a grid of layers (the last on top) by positions.

    `tokens`: the input token at each position. `layers`: a label for each row. `top[layer][position]`: the
    most probable tokens there with their probabilities, the best first; the first is written in the cell,
    all of them show when the pointer or the keyboard is on it.
    """
    check_grid(tokens, layers, top)
    head = "".join(
        f'<th scope="col">{_token(token)}<small>{position}</small></th>' for position, token in enumerate(tokens)
    )
    order = range(len(layers) - 1, -1, -1)
    body = "\n".join(_row(str(layers[row]), top[row], row) for row in order)
    ranks = [[[[visible(token), round(float(p), 5)] for token, p in cell] for cell in row] for row in top]
    data = {"tokens": [visible(token) for token in tokens], "layers": list(map(str, layers)), "top": ranks}
    page = Template(resources.files("insitu.plots").joinpath("lens_page.html").read_text("utf-8"))
    text = page.substitute(
        title=html.escape(title),
        head=head,
        body=body,
        # Inside a script element only `<` could end it; as an escape it is the same JSON.
        data=json.dumps(data, ensure_ascii=False).replace("<", "\\u003c"),
    )
    Path(path).write_text(text, encoding="utf-8")


def _row(layer: str, row: Sequence[Sequence[tuple[str, float]]], index: int) -> str:
    cells = "".join(_cell(cell, f"{index},{position}") for position, cell in enumerate(row))
    return f'<tr><th scope="row">{html.escape(layer)}</th>{cells}</tr>'


def _cell(cell: Sequence[tuple[str, float]], place: str) -> str:
    token, probability = cell[0]
    strong = ' class="strong"' if probability > 0.5 else ""
    shade = f'style="--p:{float(probability):.3f}"'
    return f'<td tabindex="0" data-at="{place}"{strong} {shade}>{_token(token)}</td>'


def _token(token: str) -> str:
    return html.escape(shorten(visible(token), 14))
