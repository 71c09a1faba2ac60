"""Test cases for extensions to inherit. Needs pytest."""

from cumulant.testing.measures import MeasureCase

__all__ = ["MeasureCase"]
