"""Figures: each function writes one file and needs no display. Install with `pip install insitu[plots]`."""

from insitu.plots.attention import attention_png
from insitu.plots.curves import curves_png
from insitu.plots.heat import heat_map_png
from insitu.plots.lens import logit_lens_png
from insitu.plots.lens_page import logit_lens_html
from insitu.plots.strip import token_strip_png

__all__ = ["attention_png", "curves_png", "heat_map_png", "logit_lens_html", "logit_lens_png", "token_strip_png"]
