"""The experiments and figures of ``docs/fixed-point.md``."""
