"""Contrastive learning: the likelihood of the tilted family (docs/theory.md, T24)."""

from cumulant.contrastive.chunks import encode_in_chunks
from cumulant.contrastive.info_nce import Contrast, contrast, info_nce, nt_xent
from cumulant.contrastive.queue import KeyQueue, Temperature
from cumulant.contrastive.sampled import (
    AliasSampler,
    nce,
    negative_sampling,
    sampled_softmax,
)
from cumulant.contrastive.sigmoid import sigmoid_loss
from cumulant.contrastive.vocabulary import (
    LossAndEntropy,
    LossAndLse,
    LossLseEntropy,
    linear_cross_entropy,
)

__all__ = [
    "AliasSampler",
    "Contrast",
    "KeyQueue",
    "LossAndEntropy",
    "LossAndLse",
    "LossLseEntropy",
    "Temperature",
    "contrast",
    "encode_in_chunks",
    "info_nce",
    "linear_cross_entropy",
    "nce",
    "negative_sampling",
    "nt_xent",
    "sampled_softmax",
    "sigmoid_loss",
]
