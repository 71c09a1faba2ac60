"""Layers."""

from cumulant.nn.equilibrium import Equilibrium

__all__ = ["Equilibrium"]
