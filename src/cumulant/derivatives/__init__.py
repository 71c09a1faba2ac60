"""Derivatives through whole models: a checker, and torch's norms with every derivative right."""

from cumulant.derivatives.checking import check_derivatives
from cumulant.derivatives.composites import batch_norm, instance_norm, layer_norm
from cumulant.derivatives.differentiable import differentiable
from cumulant.derivatives.reporting import DerivativeReport, Fault, Row

__all__ = [
    "DerivativeReport",
    "Fault",
    "Row",
    "batch_norm",
    "check_derivatives",
    "differentiable",
    "instance_norm",
    "layer_norm",
]
