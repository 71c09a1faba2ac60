"""Layers."""

from cumulant.nn.equilibrium import Equilibrium
from cumulant.nn.hopfield import Association, Hopfield
from cumulant.nn.hopfield_learned import HopfieldLookup, HopfieldPooling
from cumulant.nn.moments import MomentAttention, TokenMoments
from cumulant.nn.similarity import Similarity, similarity
from cumulant.nn.transformer import Attention, Block, Transformer

__all__ = [
    "Association",
    "Attention",
    "Block",
    "Equilibrium",
    "Hopfield",
    "HopfieldLookup",
    "HopfieldPooling",
    "MomentAttention",
    "Similarity",
    "TokenMoments",
    "Transformer",
    "similarity",
]
