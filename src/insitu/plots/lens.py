"""The logit lens as a picture."""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from insitu.plots.canvas import INK, QUIET, SIZE, drawable, fonts, new_figure, save
from insitu.plots.tokens import shorten, width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

COLUMNS = (3, 12)  # the narrowest and the widest cell, in characters
# Measures in ems, one em being the size of the text.
CHARACTER, ROW, BAND, GAP, MARGIN = 0.64, 2.1, 120.0, 4.2, 1.0
SCALE_WIDTH = 7.0


def logit_lens_png(
    path: str | os.PathLike[str],
    tokens: Sequence[str],
    layers: Sequence[Any],
    cells: Sequence[Sequence[str]],
    probs: Sequence[Sequence[float]],
) -> None:
    """Writes a grid of layers (the last on top) by positions, each cell with its top token.

    `tokens`: the input token at each position. `layers`: a label for each row. `cells[layer][position]`:
    the token that the lens finds most probable there; `probs`: its probability, which is the cell's colour.
    A long prompt continues in a further band below the first.
    """
    check_grid(tokens, layers, cells, probs)
    grid = [[float(value) for value in row] for row in probs]
    labels = [[shorten(drawable(token), COLUMNS[1]) for token in row] for row in cells]
    inputs = [shorten(drawable(token), COLUMNS[1]) for token in tokens]
    rows = [str(layer) for layer in layers]
    widths = [_cell_width([inputs[x], str(x), *(row[x] for row in labels)]) for x in range(len(tokens))]
    bands = _bands(widths)
    left = CHARACTER * max(width(row) for row in rows) + 2.8
    across = left + max(sum(widths[band.start : band.stop]) for band in bands) + SCALE_WIDTH
    band_up = ROW * len(rows)
    up = MARGIN + len(bands) * (band_up + GAP)

    figure = new_figure(across, up)
    for number, band in enumerate(bands):
        bottom = up - MARGIN - number * (band_up + GAP) - band_up
        edges = [0.0, *itertools.accumulate(widths[band.start : band.stop])]
        axes = figure.add_axes((left / across, bottom / up, edges[-1] / across, band_up / up))
        part = [row[band.start : band.stop] for row in grid]
        shading = axes.pcolormesh(edges, range(len(rows) + 1), part, cmap="Blues", vmin=0, vmax=1)
        shading.set(edgecolor="white", linewidth=1)
        _write_cells(axes, edges, [row[band.start : band.stop] for row in labels], part)
        _label_axes(axes, edges, [f"{inputs[x]}\n{x}" for x in band], rows)
        if number == 0:
            height = min(band_up, 14.0)
            place = (left + edges[-1] + 1, bottom + band_up - height, 0.9, height)
            scale = figure.add_axes((place[0] / across, place[1] / up, place[2] / across, place[3] / up))
            _draw_scale(scale, shading)
    save(figure, path)


def check_grid(tokens: Sequence[str], layers: Sequence[Any], *grids: Sequence[Sequence[Any]]) -> None:
    """Every grid has a row for each layer and in it an entry for each token."""
    if not len(tokens) or not len(layers):
        raise ValueError("a logit lens needs at least one token and one layer")
    for grid in grids:
        shape = {len(row) for row in grid}
        if len(grid) != len(layers) or shape != {len(tokens)}:
            raise ValueError(
                f"expected {len(layers)} rows of {len(tokens)} entries (layers by tokens), "
                f"got {len(grid)} rows of {' or '.join(map(str, sorted(shape)))}"
            )


def _write_cells(axes: Axes, edges: list[float], labels: list[list[str]], probs: list[list[float]]) -> None:
    for y, (row, row_probs) in enumerate(zip(labels, probs, strict=True)):
        for start, stop, label, probability in zip(edges, edges[1:], row, row_probs, strict=False):
            color = "white" if probability > 0.55 else INK
            place = {"ha": "center", "va": "center_baseline", "family": fonts(), "parse_math": False}
            axes.text((start + stop) / 2, y + 0.5, label, size=SIZE, color=color, **place)


def _label_axes(axes: Axes, edges: list[float], tokens: list[str], layers: list[str]) -> None:
    middles = [(start + stop) / 2 for start, stop in itertools.pairwise(edges)]
    axes.set_xticks(middles, tokens, size=SIZE, color=INK, family=fonts(), parse_math=False)
    axes.set_yticks([y + 0.5 for y in range(len(layers))], layers, size=SIZE, color=INK)
    axes.set_ylabel("layer", size=SIZE, color=QUIET)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_scale(axes: Axes, shading: QuadMesh) -> None:
    axes.figure.colorbar(shading, cax=axes, ticks=[0, 0.5, 1], drawedges=False)
    axes.tick_params(labelsize=SIZE - 1, length=2, labelcolor=INK)
    axes.set_ylabel("probability", size=SIZE - 1, color=QUIET)
    axes.spines[:].set_visible(False)


def _cell_width(labels: list[str]) -> float:
    narrowest, widest = COLUMNS
    return CHARACTER * (max(narrowest, min(widest, max(map(width, labels)))) + 1)


def _bands(widths: list[float]) -> list[range]:
    """Ranges of positions that fit side by side into `BAND` ems, about equally wide."""
    ends = list(itertools.accumulate(widths))
    count = math.ceil(ends[-1] / BAND)
    starts = [bisect.bisect_left(ends, ends[-1] * band / count) for band in range(count)]
    starts[1:] = [start + 1 for start in starts[1:]]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(widths)], strict=True)]
