"""Attention patterns with their tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from insitu.plots.canvas import INK, SIZE, drawable, fonts, new_figure, save
from insitu.plots.tokens import shorten

ACROSS, WIDEST, LABELLED = 4, 10, 48
CELL, LEAST, MOST = 1.25, 16.0, 60.0


def attention_png(
    path: str | os.PathLike[str],
    tokens: Sequence[str],
    patterns: Sequence[Sequence[Sequence[float]]],
    titles: Sequence[str],
) -> None:
    """Writes one square for each pattern ``[queries][keys]``: queries down, keys across, darker for more.

    With many tokens only some are labelled.
    """
    if not patterns or len(patterns) != len(titles):
        raise ValueError(f"expected a title for each pattern, and at least one; got {len(patterns)} and {len(titles)}")
    names = [shorten(drawable(token), WIDEST) for token in tokens]
    side = max(LEAST, min(MOST, CELL * len(tokens)))
    columns = min(ACROSS, len(patterns))
    rows = math.ceil(len(patterns) / columns)
    margin = 0.64 * WIDEST + 1.5
    wide, high = side + margin + 1, side + margin + 3
    figure = new_figure(columns * wide, rows * high)
    every = max(1, math.ceil(len(tokens) / min(LABELLED, side / 1.2)))
    shown = range(0, len(tokens), every)
    for number, (pattern, title) in enumerate(zip(patterns, titles, strict=True)):
        x, y = number % columns, rows - 1 - number // columns
        place = ((x * wide + margin) / (columns * wide), (y * high + margin) / (rows * high))
        axes = figure.add_axes((*place, side / (columns * wide), side / (rows * high)))
        axes.imshow(
            [list(row) for row in pattern], cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        style = {"size": SIZE - 1, "color": INK, "family": fonts()}
        axes.set_xticks(list(shown), [names[i] for i in shown], rotation=90, **style)
        first = len(tokens) - len(pattern)
        queries = [i for i in shown if i >= first]
        axes.set_yticks([i - first for i in queries], [names[i] for i in queries], **style)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set_parse_math(False)
        axes.set_title(title, size=SIZE, color=INK, loc="left")
        axes.tick_params(length=0)
        axes.spines[:].set_color("#d5dce3")
    save(figure, path)
