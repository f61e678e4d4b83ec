"""Figures: each function writes one file and needs no display. Install with `pip install insitu[plots]`."""

from insitu.plots.lens import logit_lens_png
from insitu.plots.lens_page import logit_lens_html

__all__ = ["logit_lens_html", "logit_lens_png"]
