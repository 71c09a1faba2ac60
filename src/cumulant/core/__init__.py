"""Utilities shared by every package: checks, errors, files, outcomes, precision, randomness."""
