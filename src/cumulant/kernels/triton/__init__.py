"""The GPU engine: the questions of ``engines.py`` answered by Triton kernels."""
