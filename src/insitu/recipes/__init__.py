"""Analyses of the field, each a short file to read and to copy from."""

from insitu.recipes.logit_lens import LogitLens, logit_lens

__all__ = ["LogitLens", "logit_lens"]
