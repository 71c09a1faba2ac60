"""Derivatives through whole models: a checker, and torch's functions with right derivatives."""

from cumulant.derivatives.algebra import (
    cholesky_inverse,
    det,
    householder_product,
    linear_cross_entropy,
    logdet,
    slogdet,
    solve,
)
from cumulant.derivatives.checking import check_derivatives
from cumulant.derivatives.composites import batch_norm, instance_norm, layer_norm, rms_norm
from cumulant.derivatives.differentiable import differentiable
from cumulant.derivatives.reporting import DerivativeReport, Fault, Row

__all__ = [
    "DerivativeReport",
    "Fault",
    "Row",
    "batch_norm",
    "check_derivatives",
    "cholesky_inverse",
    "det",
    "differentiable",
    "householder_product",
    "instance_norm",
    "layer_norm",
    "linear_cross_entropy",
    "logdet",
    "rms_norm",
    "slogdet",
    "solve",
]
