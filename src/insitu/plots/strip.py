"""A text whose tokens are coloured by a score."""

from __future__ import annotations

import os
from collections.abc import Sequence

from insitu.plots.canvas import INK, QUIET, SIZE, drawable, fonts, new_figure, save
from insitu.plots.tokens import shorten, width

LINE, CHARACTER, WIDEST, ROW = 90.0, 0.64, 24, 2.2


def token_strip_png(
    path: str | os.PathLike[str], tokens: Sequence[str], scores: Sequence[float], *, split: int | None = None
) -> None:
    """Writes the tokens in lines, red for scores above 0 and blue below. ``split``: how many are the prompt's; a
    line is drawn after them."""
    if len(tokens) != len(scores) or not tokens:
        raise ValueError(f"expected a score for each token, and at least one; got {len(tokens)} and {len(scores)}")
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    # A model's first token is often far off all others, which would leave these without colour.
    top = sorted(map(abs, scores))[int(len(scores) * 0.9)] or 1.0
    shades = colormaps["RdBu_r"]
    boxes, lines = _laid_out([shorten(drawable(token), WIDEST) for token in tokens])
    up = lines * ROW + 3.5
    figure = new_figure(LINE + 2, up)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1, LINE + 1), ylim=(up, 0))
    axes.axis("off")
    for number, ((x, line, wide, label), score) in enumerate(zip(boxes, scores, strict=True)):
        y = line * ROW + 0.5
        red, green, blue, _ = shades(min(1.0, max(0.0, 0.5 + score / top / 2)))
        axes.add_patch(Rectangle((x, y), wide, ROW - 0.3, facecolor=(red, green, blue), linewidth=0))
        light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
        axes.text(
            x + wide / 2, y + ROW / 2 - 0.15, label, ha="center", va="center", size=SIZE, family=fonts(),
            color=INK if light else "white", parse_math=False,
        )  # fmt: skip
        if split == number + 1 < len(tokens):
            axes.plot([x + wide + 0.1] * 2, [y - 0.1, y + ROW - 0.2], color=INK, linewidth=1.5)
    axes.text(
        0, up - 1, f"deepest red: {top:.3g} and more; deepest blue: {-top:.3g} and less", size=SIZE - 1, color=QUIET
    )
    save(figure, path)


def _laid_out(labels: Sequence[str]) -> tuple[list[tuple[float, int, float, str]], int]:
    """For each token where it begins, on which line, and how wide it is."""
    boxes: list[tuple[float, int, float, str]] = []
    x, line = 0.0, 0
    for label in labels:
        wide = CHARACTER * (width(label) + 1)
        if x and x + wide > LINE:
            x, line = 0.0, line + 1
        boxes.append((x, line, wide, label))
        x += wide + 0.2
    return boxes, line + 1
