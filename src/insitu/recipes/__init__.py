"""Analyses of the field, each a short file to read and to copy from."""

from insitu.recipes.ablation import Ablation, ablate
from insitu.recipes.attention import AttentionPatterns, attention_patterns
from insitu.recipes.logit_lens import LogitLens, logit_lens
from insitu.recipes.metrics import logit_difference
from insitu.recipes.patching import PatchSweep, patch_heads, patch_positions
from insitu.recipes.probes import Probe, TokenScores, fit_probe, probe_scores, rows_at
from insitu.recipes.sae import SparseAutoencoder, ablate_features, features, steer_feature
from insitu.recipes.steering import Steering, difference_of_means

__all__ = [
    "Ablation",
    "AttentionPatterns",
    "LogitLens",
    "PatchSweep",
    "Probe",
    "SparseAutoencoder",
    "Steering",
    "TokenScores",
    "ablate",
    "ablate_features",
    "attention_patterns",
    "difference_of_means",
    "features",
    "fit_probe",
    "logit_difference",
    "logit_lens",
    "patch_heads",
    "patch_positions",
    "probe_scores",
    "rows_at",
    "steer_feature",
]
