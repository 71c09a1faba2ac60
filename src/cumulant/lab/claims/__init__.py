"""The paper's claims as experiments, each with a verdict that follows from its numbers.

>>> entry = run(*select(["T4"]), quick=True)
>>> entry.verdict
'holds with a correction'
>>> entry.departs
False
"""

from cumulant.lab.claims.claim import VERDICTS, Claim, Evidence, Measured, Picture, Trial, verdict
from cumulant.lab.claims.ledger import Entry, claims, run, select

__all__ = [
    "VERDICTS",
    "Claim",
    "Entry",
    "Evidence",
    "Measured",
    "Picture",
    "Trial",
    "claims",
    "run",
    "select",
    "verdict",
]
