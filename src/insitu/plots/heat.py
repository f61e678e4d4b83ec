"""Heat maps: layers by positions or heads."""

from __future__ import annotations

import os
from collections.abc import Sequence

from insitu.plots.canvas import INK, QUIET, SIZE, drawable, fonts, new_figure, save
from insitu.plots.tokens import shorten, width

CHARACTER, CELL, WIDEST = 0.64, 2.0, 14
SPARSE = 40  # up to so many rows each has its label


def heat_map_png(
    path: str | os.PathLike[str],
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str = "",
    bound: float | None = None,
) -> None:
    """Writes a grid of numbers, blue below 0 and red above; the first row is at the bottom.

    ``bound``: what the deepest colours stand for, if no value is larger. Raises ``ValueError`` if ``values`` is not
    ``rows`` by ``columns``.
    """
    if len(values) != len(rows) or {len(row) for row in values} != {len(columns)}:
        raise ValueError(f"expected {len(rows)} rows of {len(columns)} values")
    top = max(bound or 0.0, max(abs(value) for row in values for value in row)) or 1.0
    names = [shorten(drawable(column), WIDEST) for column in columns]
    left = 4 + CHARACTER * max(width(row) for row in rows)
    below = 2 + CHARACTER * max(width(name) for name in names)
    # Few cells are drawn wider, so that a title finds room.
    wide, high = max(CELL * len(columns), 16), max(CELL * 0.75 * len(rows), 8)
    across, up = left + wide + 8, below + high + 3
    figure = new_figure(across, up)
    axes = figure.add_axes((left / across, below / up, wide / across, high / up))
    shading = axes.pcolormesh([list(row) for row in values], cmap="RdBu_r", vmin=-top, vmax=top)
    shading.set(edgecolor="white", linewidth=0.5)
    axes.set_xticks([x + 0.5 for x in range(len(names))], names, rotation=90, size=SIZE, color=INK, family=fonts())
    for label in axes.get_xticklabels():
        label.set_parse_math(False)
    every = -(-len(rows) // SPARSE)
    shown = range(0, len(rows), every)
    axes.set_yticks([y + 0.5 for y in shown], [rows[y] for y in shown], size=SIZE, color=INK)
    axes.set_ylabel("layer", size=SIZE, color=QUIET)
    axes.set_title(title, size=SIZE, color=INK, loc="left")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    scale = figure.add_axes(((left + wide + 1.5) / across, below / up, 0.9 / across, high / up))
    figure.colorbar(shading, cax=scale)
    scale.tick_params(labelsize=SIZE - 1, length=2, labelcolor=INK)
    scale.spines[:].set_visible(False)
    save(figure, path)
