"""Layers."""

from cumulant.nn.equilibrium import Equilibrium
from cumulant.nn.hopfield import Association, Hopfield
from cumulant.nn.hopfield_learned import HopfieldLookup, HopfieldPooling
from cumulant.nn.moments import MomentAttention, TokenMoments

__all__ = [
    "Association",
    "Equilibrium",
    "Hopfield",
    "HopfieldLookup",
    "HopfieldPooling",
    "MomentAttention",
    "TokenMoments",
]
