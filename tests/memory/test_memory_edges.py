"""Corners of memories and Hopfield layers that were wrong once."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.nn import Hopfield, HopfieldLookup, HopfieldPooling

x, states = torch.randn(6, 4), torch.randn(2, 4)
OFF = dict.fromkeys(("norm_state", "norm_stored", "norm_value"), False)


class TestRangeOfNumbers:
    @pytest.mark.parametrize(
        "call",
        [
            lambda: cm.Memory(x).retrieve(torch.full((1, 4), 1e300, dtype=torch.float64)),
            lambda: cm.Memory(x).add(torch.full((1, 4), 1e300, dtype=torch.float64)),
            lambda: cm.Memory(x, torch.tensor(1e60, dtype=torch.float64)),
            lambda: cm.Memory(x, 1e60).retrieve(states),
            lambda: cm.Memory(x, 1e60).energy(states),
            lambda: cm.Memory(x * 1e20).retrieve(x * 1e20),
            lambda: cm.Memory(x * 1e20).retrieve(x * 1e20, 0).index,
            lambda: cm.Memory(x * 1e20).separation(),
            lambda: cm.memory.classify(states * math.nan, x),
            lambda: cm.memory.classify(states * math.inf, x),
        ],
    )
    def test_out_of_range_is_an_error_not_nan(self, call):
        with pytest.raises(cm.InputError):
            call()

    def test_values_keep_their_own_precision(self):
        memory = cm.Memory(x.bfloat16(), beta=50.0, values=torch.arange(255.0, 261.0)[:, None])
        found = memory.retrieve(x.bfloat16())
        assert found.state.dtype == torch.bfloat16
        assert found.value.dtype == torch.float32
        best = found.value[:, 0][(found.value[:, 0] - found.value[:, 0].round()).abs() < 1e-3]
        assert len(best) > 0
        wide = cm.Memory(x.half(), values=torch.full((6, 1), 1e6)).retrieve(states)
        torch.testing.assert_close(wide.value, torch.full((2, 1), 1e6))

    def test_lists(self):
        memory = cm.Memory([[1.0, 2.0], [3.0, 4.0]], values=torch.eye(2))
        assert memory.retrieve(torch.zeros(1, 2)).state.dtype == memory.patterns.dtype


class TestRetrieval:
    def test_steps_of_numpy(self):
        assert (cm.Memory(x).retrieve(states, np.int64(3)).steps == 3).all()

    @pytest.mark.parametrize("field", ["energy", "index", "value"])
    @pytest.mark.parametrize("which", ["patterns", "start", "state"])
    def test_fields_after_a_change_in_place(self, field, which):
        patterns, start = x.clone(), states.clone()
        found = cm.Memory(patterns).retrieve(start, 1)
        {"patterns": patterns, "start": start, "state": found.state}[which].mul_(5)
        fresh = cm.Memory(x).retrieve(states, 1)
        used = {"start": ("value",), "state": ("energy", "index")}.get(which, (field,))
        if field not in used:
            assert torch.equal(getattr(found, field), getattr(fresh, field))
        else:
            with pytest.raises(cm.InputError, match="changed in place"):
                getattr(found, field)

    def test_fields_after_beta_moved(self):
        beta = torch.nn.Parameter(torch.tensor(1.0))
        found = cm.Memory(x, beta).retrieve(states)
        with torch.no_grad():
            beta.mul_(5)
        for field in ("energy", "value"):
            with pytest.raises(cm.InputError, match="changed in place"):
                getattr(found, field)

    def test_no_steps_is_a_copy(self):
        start = states.clone()
        cm.Memory(x).retrieve(start, 0).state.zero_()
        assert torch.equal(start, states)

    @pytest.mark.parametrize("sets", [(), (2,)])
    def test_pickles(self, sets):
        found = cm.Memory(x.expand(*sets, 6, 4)).retrieve(states.expand(*sets, 2, 4), tol=1e-3)
        for again in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
            assert torch.equal(again.energy, found.energy)
        signs = (x > 0).float() * 2 - 1
        other = cm.memory.ClassicalMemory(signs).retrieve(signs)
        assert torch.equal(pickle.loads(pickle.dumps(other)).index, other.index)


class TestFilesAgain:
    def test_values_that_are_the_patterns(self, tmp_path):
        memory = cm.Memory(x, values=x)
        memory.save(tmp_path / "m")
        assert torch.equal(cm.Memory.load(tmp_path / "m").values, x)

    def test_nothing_else_in_the_folder_is_touched(self, tmp_path):
        (tmp_path / "m.part").write_text("mine")
        (tmp_path / "link").symlink_to(tmp_path / "m")
        cm.Memory(x).save(tmp_path / "link")
        assert (tmp_path / "m.part").read_text() == "mine"
        assert (tmp_path / "link").is_symlink()
        assert torch.equal(cm.Memory.load(tmp_path / "m").patterns, x)

    @pytest.mark.parametrize(
        "call",
        [
            lambda m, p: m.save(3),
            lambda m, p: cm.Memory.load(None),
            lambda m, p: m.save(p / ("n" * 300)),
            lambda m, p: cm.Memory.load(p / ("n" * 300)),
            lambda m, p: m.save("/proc/nowhere"),
            lambda m, p: cm.Memory.load(p / "m", device="bogus"),
        ],
    )
    def test_one_clear_error(self, call, tmp_path):
        memory = cm.Memory(x)
        memory.save(tmp_path / "m")
        with pytest.raises(cm.InputError):
            call(memory, tmp_path)


def test_what_is_added_is_what_is_saved(tmp_path):
    memory = cm.Memory(x.half())
    with pytest.raises(cm.InputError, match="finite"):
        memory.add(torch.full((1, 4), 1e6))
    memory.add(torch.full((1, 4), 1.23456789))
    memory.save(tmp_path / "m")
    assert torch.equal(cm.Memory.load(tmp_path / "m").patterns, memory.patterns)


class TestClassical:
    def test_a_field_of_zero_keeps_the_sign(self):
        """Against whole numbers, for sizes that are no powers of two."""
        g = torch.Generator().manual_seed(0)
        ties = 0
        for d in (5, 6, 7, 11):
            for n in (2, 3, 4):
                p = 2 * torch.randint(0, 2, (n, d), generator=g) - 1
                s = 2 * torch.randint(0, 2, (20, d), generator=g) - 1
                field = s @ (p.T @ p) - n * s
                ties += int((field == 0).sum())
                expected = torch.where(field == 0, s, field.sign()).float()
                got = cm.memory.ClassicalMemory(p.float()).retrieve(s.float()).state
                assert torch.equal(got, expected)
        assert ties > 50

    def test_asynchronous_with_learned_patterns(self):
        p = torch.nn.Parameter((x > 0).float() * 2 - 1)
        found = cm.memory.ClassicalMemory(p, asynchronous=True).retrieve(p.detach(), 2)
        assert found.state.abs().eq(1).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: cm.memory.classify([[1.0]], "a"),
        lambda: cm.memory.classify(None, None),
        lambda: cm.memory.classify(states[:0], x),
        lambda: cm.memory.classify(states, x[:0]),
        lambda: cm.Memory(x).error_bound(states, "a"),
        lambda: cm.Memory(x).error_bound(states, [None, 1]),
        lambda: cm.memory.recall(cm.memory.LinearMemory, 32, 10),
        lambda: cm.memory.recall(None, 32, [2]),
        lambda: cm.memory.capacity(2, failure=1e-200),
        lambda: cm.memory.capacity(100, radius=1e-180),
        lambda: cm.memory.capacity(20, beta=1e308),
        lambda: cm.memory.capacity(10**400),
        lambda: Hopfield(4, beta="a"),
        lambda: Hopfield(4, zero_pattern=True)(x[None], mask=[True]),
    ],
)
def test_one_clear_error(call):
    with pytest.raises(cm.InputError):
        call()


def test_recall_of_everything_exactly():
    rate = cm.memory.recall(lambda p: cm.Memory(p, beta=5.0), 10, [3], flips=0.0, overlap=1.0).rate
    assert rate == (1.0,)


class TestLayers:
    def test_energy_does_not_see_hidden_patterns(self):
        layer = Hopfield(12, heads=2, **OFF)
        s, y = torch.randn(3, 5, 12), torch.randn(3, 9, 12)
        mask = (torch.arange(9) < 7)[None, None, None, :]
        expected = layer.associate(s, y[:, :7]).energy
        for filling in (100.0, math.nan):
            z = y.clone()
            z[:, 7:] = filling
            torch.testing.assert_close(layer.associate(s, z, mask=mask).energy, expected)
        added = torch.where(mask, 0.0, -math.inf)
        torch.testing.assert_close(layer.associate(s, y, mask=added).energy, expected)

    def test_energy_has_the_gradient_of_its_largest_norm(self):
        layer = Hopfield(6, **OFF).double()
        s, y = torch.randn(1, 3, 6).double(), torch.randn(1, 5, 6).double().requires_grad_()
        mask = torch.ones(1, 1, 3, 5).bool()
        a, b = (layer.associate(s, y, mask=m).energy.sum() for m in (mask, None))
        torch.testing.assert_close(*(torch.autograd.grad(e, y)[0] for e in (a, b)))

    def test_a_row_that_sees_nothing(self):
        layer = Hopfield(6, heads=2)
        s, y = torch.randn(2, 3, 6, requires_grad=True), torch.randn(2, 5, 6)
        mask = torch.ones(2, 1, 3, 5).bool()
        mask[0, 0, 1] = False
        done = layer.associate(s, y, mask=mask)
        assert done.energy.isfinite().all()
        assert (done.energy[0, :, 1] == 0).all()
        (done.energy.sum() + done.output.sum()).backward()
        assert s.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_computed_in_single(self, dtype):
        layer = Hopfield(8, heads=2, beta=2e4, steps=2, **OFF).to(dtype)
        s, y = 20 * torch.randn(1, 3, 8, dtype=dtype), 20 * torch.randn(1, 5, 8, dtype=dtype)
        done = layer.associate(s, y)
        assert done.output.dtype == dtype
        assert done.output.isfinite().all()
        assert done.energy.isfinite().all()
        assert done.energy.dtype == torch.float32

    def test_energy_under_autocast(self):
        layer = Hopfield(6, heads=2, steps=3)
        s, mask = torch.randn(2, 3, 6), torch.ones(3).bool()
        plain = layer.associate(s, mask=mask).energy
        with torch.autocast("cpu", torch.bfloat16):
            done = layer.associate(s, mask=mask)
            assert done.output.dtype == torch.bfloat16
            assert done.energy.dtype == torch.float32
        torch.testing.assert_close(done.energy, plain, rtol=0.05, atol=0.05)

    def test_energy_after_a_change_in_place(self):
        off = dict.fromkeys(("project_state", "project_stored", "project_value"), False)
        layer = HopfieldLookup(4, quantity=5, **OFF, **off)
        done = layer.associate(torch.randn(1, 3, 4))
        with torch.no_grad():
            layer.patterns.mul_(30)
        with pytest.raises(cm.InputError, match="changed in place"):
            _ = done.energy

    def test_an_empty_set(self):
        done = Hopfield(4).associate(torch.randn(1, 3, 4), torch.randn(1, 0, 4))
        assert (done.energy == 0).all()

    def test_beta_is_exact_in_double(self):
        assert (Hopfield(12, heads=3).double().beta == 0.5).all()

    def test_reset_draws_everything_anew(self):
        for layer in (HopfieldPooling(4), HopfieldLookup(4, separate_values=True)):
            with torch.no_grad():
                for p in layer.parameters():
                    p.fill_(9.0)
            layer.reset_parameters()
            assert all((p != 9).all() for p in layer.parameters())
