"""`python -m cumulant`."""

from cumulant.cli import main

main()
