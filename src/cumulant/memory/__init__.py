"""Associative memory: Hopfield networks, dense and classical (docs/theory.md, T19-T22, T33)."""

from cumulant.memory.capacity import Capacity, Recall, capacity, recall
from cumulant.memory.classes import Classes, classify
from cumulant.memory.compare import Comparison, Run, compare
from cumulant.memory.dense import Memory
from cumulant.memory.linear import ClassicalMemory, LinearMemory
from cumulant.memory.retrieval import Retrieval

__all__ = [
    "Capacity",
    "Classes",
    "ClassicalMemory",
    "Comparison",
    "LinearMemory",
    "Memory",
    "Recall",
    "Retrieval",
    "Run",
    "capacity",
    "classify",
    "compare",
    "recall",
]
