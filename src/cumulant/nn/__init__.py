"""Layers."""

from cumulant.nn.equilibrium import Equilibrium
from cumulant.nn.hopfield import Association, Hopfield, HopfieldLookup, HopfieldPooling

__all__ = ["Association", "Equilibrium", "Hopfield", "HopfieldLookup", "HopfieldPooling"]
