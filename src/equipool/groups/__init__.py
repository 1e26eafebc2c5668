"""The group mathematics: rotations of SO(n), the covariates' action on the latent sphere, τ and Φ."""

from equipool.groups.action import CovariateAction, PlaneRotation, all_ones_frequencies
from equipool.groups.tau import FrameTau, LearnedTau, Phi

__all__ = ["CovariateAction", "FrameTau", "LearnedTau", "Phi", "PlaneRotation", "all_ones_frequencies"]
