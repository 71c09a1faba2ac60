"""Layers."""

from cumulant.nn.equilibrium import Equilibrium
from cumulant.nn.hopfield import Association, Hopfield
from cumulant.nn.hopfield_learned import HopfieldLookup, HopfieldPooling

__all__ = ["Association", "Equilibrium", "Hopfield", "HopfieldLookup", "HopfieldPooling"]
