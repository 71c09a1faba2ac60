"""The paper's claims as experiments, each with a verdict that follows from its numbers.

>>> entry = run(*select(["T4"]), quick=True)
>>> entry.verdict
'holds with a correction'
>>> entry.departs
False
"""

from cumulant.lab.claims.claim import (
    EVIDENCE,
    VERDICTS,
    Claim,
    Found,
    Measured,
    Picture,
    Result,
    Rule,
    Trial,
    table,
    verdict,
)
from cumulant.lab.claims.ledger import Entry, claims, run, select

__all__ = [
    "EVIDENCE",
    "VERDICTS",
    "Claim",
    "Entry",
    "Found",
    "Measured",
    "Picture",
    "Result",
    "Rule",
    "Trial",
    "claims",
    "run",
    "select",
    "table",
    "verdict",
]
