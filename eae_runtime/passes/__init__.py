"""Passes: transforms of an adjoint between two blocks. :class:`EAEPass` is what to subclass."""

from .base import EAEPass
from .clip import ClipPass
from .core_pass import CorePass
from .logging_pass import LoggingPass
from .quantize import BF16Pass, FP8Pass, FP16Pass, Int8QuantizationPass
from .regularization import GaussianNoisePass, RegularizationPass
from .synthetic_gradient import SyntheticGradientPass

__all__ = [
    "BF16Pass",
    "ClipPass",
    "CorePass",
    "EAEPass",
    "FP8Pass",
    "FP16Pass",
    "GaussianNoisePass",
    "Int8QuantizationPass",
    "LoggingPass",
    "RegularizationPass",
    "SyntheticGradientPass",
]
