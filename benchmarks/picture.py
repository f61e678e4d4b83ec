"""The rows of a comparison and the curves of growth, in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.comparison import BASE, WORKS
from benchmarks.growth import Curve

TIMES = {"cpu": "processor time", "wall": "time"}
COLOURS = ("0.55", "tab:blue", "tab:orange", "tab:green", "tab:red")


def picture(rows: list[dict[str, Any]], curves: Mapping[str, Curve], clock: str, file: Path) -> None:
    """`curves`: by what grows in each."""
    panels = bool(rows) + len(curves)
    figure = Figure(figsize=(4.2 * min(panels, 3), 3.6 * -(-panels // 3)), layout="constrained")
    axes = list(figure.subplots(-(-panels // 3), min(panels, 3), squeeze=False).flat)
    for unused in axes[panels:]:
        unused.set_axis_off()
    if rows:
        bars(axes.pop(0), rows, clock)
    for axis, (what, curve) in zip(axes, curves.items(), strict=False):
        lines(axis, what, curve)
    figure.savefig(file, dpi=110)


def bars(axis: Any, rows: list[dict[str, Any]], clock: str) -> None:
    measured = [row for row in rows if "error" not in row]
    systems = list(dict.fromkeys(row["system"] for row in measured))
    works = [title for title in WORKS.values() if any(row["work"] == title for row in measured)]
    thick = 0.8 / max(len(systems), 1)
    for number, system in enumerate(systems):
        own = [row for row in measured if row["system"] == system]
        at = [works.index(row["work"]) + (number - (len(systems) - 1) / 2) * thick for row in own]
        middle, least, most = zip(*(row[f"{clock}_ratio"] for row in own), strict=True)
        spread = [
            [m - low for m, low in zip(middle, least, strict=True)],
            [h - m for m, h in zip(middle, most, strict=True)],
        ]
        axis.bar(at, middle, thick, yerr=spread, label=system, color=COLOURS[number % len(COLOURS)])
    axis.set_xticks(range(len(works)), works, fontsize="small")
    axis.set_ylabel(f"speed to {BASE}, {TIMES[clock]}")
    axis.set_ylim(0, 1.5)
    axis.legend(fontsize="x-small")


def lines(axis: Any, what: str, curve: Curve) -> None:
    points = list(curve)
    for number, name in enumerate(next(iter(curve.values()))):
        middle, least, most = zip(*(found[name] for found in curve.values()), strict=True)
        colour = COLOURS[number % len(COLOURS)]
        axis.plot(points, middle, marker="o", markersize=3, label=name, color=colour)
        axis.fill_between(points, least, most, alpha=0.2, color=colour, linewidth=0)
    medians = [middle for found in curve.values() for middle, *_ in found.values()]
    axis.set(xscale="log", xlabel=what, ylabel="processor time a request, µs")
    if max(medians) > 10 * min(medians):
        axis.set_yscale("log")
    else:
        axis.set_ylim(0, 1.3 * max(medians))
    axis.legend(fontsize="x-small")
