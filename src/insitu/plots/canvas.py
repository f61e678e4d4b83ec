"""What all figures share: fonts that have the characters, and a canvas that needs no display."""

from __future__ import annotations

import functools
import os
from typing import Any

from insitu.plots.tokens import escaped, visible

# Fonts that cover what matplotlib's own does not, by the names that they have where they are installed.
FALLBACK_FONTS = (
    "Noto Sans CJK JP",
    "Noto Sans CJK SC",
    "Noto Sans",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Sans Symbols2",
    "Noto Emoji",
    "Symbola",
    "WenQuanYi Zen Hei",
    "IPAGothic",
    "Hiragino Sans",
    "Apple Symbols",
    "Arial Unicode MS",
    "Microsoft YaHei",
)
DPI = 130
LONGEST_SIDE = 30_000  # pixels; past it the dots per inch go down
SIZE = 9  # of the text, in points
INK, QUIET = "#1c2733", "#5b6b7b"


def new_figure(across: float, up: float) -> Any:
    """An empty figure; its sides in ems, one em being the size of the text."""
    # Not pyplot: it keeps figures, wants to choose a display, and belongs to the user.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install insitu[plots]") from error
    figure = Figure(figsize=(across * SIZE / 72, up * SIZE / 72), facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    longest = max(figure.get_size_inches())
    figure.savefig(path, dpi=min(DPI, LONGEST_SIDE / longest), format="png")


def drawable(token: str) -> str:
    """The token as shown, characters that no font here has written by their number."""
    return "".join(c if ord(c) in _covered() else escaped(c) for c in visible(token))


@functools.cache
def fonts() -> list[str]:
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]


@functools.cache
def _covered() -> frozenset[int]:
    from matplotlib import font_manager

    files = [font_manager.findfont(name) for name in fonts()]
    return frozenset().union(*(font_manager.get_font(file).get_charmap() for file in files))
