"""The command line."""

from cumulant.cli.main import main

__all__ = ["main"]
