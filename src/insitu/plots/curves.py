"""Curves over layers."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from insitu.plots.canvas import INK, QUIET, SIZE, fonts, new_figure, save

COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")
ACROSS, UP, LABELLED = 60.0, 26.0, 30


def curves_png(
    path: str | os.PathLike[str],
    curves: Mapping[str, Sequence[float]],
    *,
    labels: Sequence[str] | None = None,
    across: str = "layer",
    title: str = "",
) -> None:
    """Writes one line for each curve, all of the same length; ``labels``: what stands below each point."""
    lengths = {len(curve) for curve in curves.values()}
    if len(lengths) != 1 or 0 in lengths or (labels is not None and len(labels) not in lengths):
        raise ValueError(f"expected curves of one length, with a label for each point; got lengths {sorted(lengths)}")
    count = lengths.pop()
    names = [str(number) for number in range(count)] if labels is None else list(labels)
    below = 3 + 0.55 * max(map(len, names)) if labels is not None else 4
    figure = new_figure(ACROSS, UP + below)
    axes = figure.add_axes((6 / ACROSS, below / (UP + below), (ACROSS - 8) / ACROSS, (UP - 3) / (UP + below)))
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(range(count), list(curve), color=colour, marker="o", markersize=3, linewidth=1.5, label=name)
    shown = range(0, count, math.ceil(count / LABELLED))
    rotation = 90 if labels is not None else 0
    axes.set_xticks(list(shown), [names[x] for x in shown], rotation=rotation, size=SIZE, color=INK, family=fonts())
    axes.tick_params(labelsize=SIZE, length=2, labelcolor=INK)
    axes.axhline(0, color="#d5dce3", linewidth=1, zorder=0)
    axes.set_title(title, size=SIZE, color=INK, loc="left")
    if labels is None:
        axes.set_xlabel(across, size=SIZE, color=QUIET)
    if len(curves) > 1 or not title:
        axes.legend(frameon=False, fontsize=SIZE, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d5dce3")
    save(figure, path)
