"""A short form of the fuzzer; `python tests/fuzz/interrupts.py` is the long one."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from torch import nn

import cumulant as cm
from cumulant.core.interception import Scope, Token
from cumulant.lens.sensitivity import Group, sensitivity
from cumulant.lens.weights import Block
from fuzz import interrupts


@pytest.mark.parametrize("part", range(2))
def test_nothing_stays_behind(part):
    """In a process of its own: a signal may also spoil what is torch's."""
    command = [sys.executable, interrupts.__file__, "--rounds=150", "--seed=0"]
    run = subprocess.run([*command, f"--first={150 * part}"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "nothing stayed behind" in run.stdout


def test_what_the_fuzzer_finds(monkeypatch):
    """A scope that does not clean up after an interrupt while it is entered."""
    kept = []

    def careless(self):
        begun = self._begin()
        kept.append(self)
        self._entered = Token(self, begun.effects), begun
        for effect in begun.effects:
            effect.put(self._entered[0])
        return begun.result

    subject, found = interrupts.subjects()[0], []
    with monkeypatch.context() as patch:
        patch.setattr(Scope, "__enter__", careless)
        for k in range(100):
            choose = random.Random(k)
            interrupts.attack(interrupts.scenario(subject, choose), choose, timer=False)
            if found := interrupts.residue():
                break
    for scope in kept:
        scope.__exit__(KeyboardInterrupt)
    assert found
    assert interrupts.residue() == []
    assert interrupts.sound(subject) == []


def test_an_interrupt_before_the_first_instruction_of_leaving():
    """The one moment that Python leaves open: undone with the traceback."""
    subject = interrupts.subjects()[0]

    class Interrupted(Scope):
        def __exit__(self, *_):
            raise KeyboardInterrupt

    begin = cm.sdpa_replaced()._begin
    with pytest.raises(KeyboardInterrupt) as raised, Interrupted(begin):
        pass
    assert interrupts.residue() != []
    del raised
    assert interrupts.residue() == []
    assert interrupts.sound(subject) == []


def test_sensitivity_gives_back_every_gradient():
    """Interrupted at every moment in turn."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    model[1].requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    group = Group(0, [], [Block(model[2].weight)])

    def run():
        sensitivity(model, lambda: model(torch.ones(1, 2)), [group], probes=1)

    for at in range(1, interrupts.traced(run, None).count + 1):
        with pytest.raises(KeyboardInterrupt):
            interrupts.traced(run, at)
        assert [p.requires_grad for p in model.parameters()] == before, at
