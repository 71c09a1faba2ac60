"""Benchmarks: each compares with the real alternative in the same run and prints a ratio."""
