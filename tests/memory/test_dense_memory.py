"""`Memory`: retrieval, energy, changes, files, bad input."""

from __future__ import annotations

import math

import pytest
import torch

import cumulant as cm


def dense_update(x, patterns, beta):
    return (beta * x @ patterns.mT).softmax(-1) @ patterns


def patterns_and_states(batch=(), n=12, d=6, q=5, dtype=torch.float64):
    return torch.randn(*batch, n, d, dtype=dtype), torch.randn(*batch, q, d, dtype=dtype)


class TestRetrieve:
    @pytest.mark.parametrize("steps", [0, 1, 2, 7])
    @pytest.mark.parametrize("step_size", [1.0, 0.3])
    def test_exactly_so_many_steps(self, steps, step_size):
        patterns, x = patterns_and_states()
        found = cm.Memory(patterns, beta=0.7).retrieve(x, steps, step_size=step_size)
        expected = x
        for _ in range(steps):
            to = dense_update(expected, patterns, 0.7)
            expected = (1 - step_size) * expected + step_size * to
        torch.testing.assert_close(found.state, expected)
        assert (found.steps == steps).all()

    def test_one_step_is_attention(self):
        patterns, x = patterns_and_states(dtype=torch.float32)
        found = cm.Memory(patterns, beta=0.5).retrieve(x)
        theirs = torch.nn.functional.scaled_dot_product_attention(
            x[None], patterns[None], patterns[None], scale=0.5
        )[0]
        torch.testing.assert_close(found.state, theirs)

    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_each_query_stops_by_itself(self, batch):
        """Alone or in company, a query takes the same path and stops at the same step."""
        patterns, x = patterns_and_states(batch, q=8)
        memory = cm.Memory(patterns, beta=1.5)
        found = memory.retrieve(x, tol=1e-6)
        assert found.converged.all()
        assert len(found.steps.unique()) > 1
        for i in range(8):
            alone = memory.retrieve(x[..., i : i + 1, :], tol=1e-6)
            torch.testing.assert_close(alone.state, found.state[..., i : i + 1, :])
            assert torch.equal(alone.steps, found.steps[..., i : i + 1])
        again = found.state
        for _ in range(1):
            again = dense_update(again, patterns, 1.5)
        assert ((again - found.state).norm(dim=-1) <= 1e-6).all()

    def test_steps_by_hand(self):
        """Changes of a plain loop say when each must have stopped."""
        patterns, x = patterns_and_states(q=10)
        changes, y = [], x
        for _ in range(60):
            new = dense_update(y, patterns, 1.2)
            changes.append((new - y).norm(dim=-1))
            y = new
        small = torch.stack(changes) <= 1e-4
        expected = torch.where(small.any(0), small.long().argmax(0) + 1, 60)
        found = cm.Memory(patterns, beta=1.2).retrieve(x, 60, tol=1e-4)
        assert torch.equal(found.steps, expected)
        assert torch.equal(found.converged, small.any(0))

    def test_steps_bound_tol(self):
        patterns, x = patterns_and_states()
        found = cm.Memory(patterns, beta=1.0).retrieve(x, 2, tol=1e-12)
        assert (found.steps == 2).all()
        assert not found.converged.any()

    def test_gradients_of_everything(self):
        patterns, x = patterns_and_states(n=5, d=3, q=2)
        values = torch.randn(5, 2, dtype=torch.float64)
        beta = torch.tensor(0.6, dtype=torch.float64)

        def run(x, patterns, beta, values):
            found = cm.Memory(patterns, beta, values=values).retrieve(x, 3)
            return found.state, found.energy, found.value

        leaves = [t.clone().requires_grad_() for t in (x, patterns, beta, values)]
        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves)

    def test_gradient_with_tol(self):
        patterns, x = patterns_and_states()
        patterns.requires_grad_()
        found = cm.Memory(patterns, beta=1.0).retrieve(x, 30, tol=1e-3)
        (ours,) = torch.autograd.grad(found.state.sum(), patterns)
        loose = 0.0
        for i, n in enumerate(found.steps.tolist()):
            y = x[i : i + 1]
            for _ in range(n):
                y = dense_update(y, patterns, 1.0)
            loose = loose + y.sum()
        torch.testing.assert_close(ours, torch.autograd.grad(loose, patterns)[0])

    def test_index_and_value(self):
        patterns, x = patterns_and_states(n=30)
        values = torch.randn(30, 4, dtype=torch.float64)
        found = cm.Memory(patterns, beta=0.8, values=values).retrieve(x, 2)
        first = dense_update(x, patterns, 0.8)
        torch.testing.assert_close(found.value, (0.8 * first @ patterns.mT).softmax(-1) @ values)
        assert torch.equal(found.index, (found.state @ patterns.mT).argmax(-1))
        plain = cm.Memory(patterns, beta=0.8).retrieve(x, 2)
        torch.testing.assert_close(plain.value, plain.state)

    def test_value_is_of_the_last_update_with_tol_too(self):
        patterns, x = patterns_and_states(n=30)
        found = cm.Memory(patterns, beta=0.8, values=patterns * 2).retrieve(x, tol=1e-2)
        torch.testing.assert_close(found.value, 2 * found.state)
        assert (found.steps > 1).any()

    def test_sets_with_their_own_beta(self):
        patterns, x = patterns_and_states((2, 3))
        beta = torch.rand(2, 3, dtype=torch.float64) + 0.5
        memory = cm.Memory(patterns, beta)
        found = memory.retrieve(x, 2)
        for i in range(2):
            for j in range(3):
                one = cm.Memory(patterns[i, j], float(beta[i, j]))
                alone = one.retrieve(x[i, j], 2)
                torch.testing.assert_close(found.state[i, j], alone.state)
                torch.testing.assert_close(found.energy[i, j], alone.energy)
                torch.testing.assert_close(memory.separation()[i, j], one.separation())
                torch.testing.assert_close(
                    memory.error_bound(x)[i, j], one.error_bound(x[i, j]), rtol=1e-8, atol=0
                )
        shared = memory.retrieve(x[0, 0], 1)  # the same states for all sets
        assert shared.state.shape == (2, 3, 5, 6)

    def test_states_of_any_batch_share_one_set(self):
        patterns, _ = patterns_and_states()
        x = torch.randn(2, 3, 4, 6, dtype=torch.float64)
        found = cm.Memory(patterns).retrieve(x, tol=1e-3)
        assert found.state.shape == x.shape
        assert found.energy.shape == found.steps.shape == found.index.shape == (2, 3, 4)

    def test_half_precision(self):
        patterns, x = patterns_and_states(dtype=torch.float32)
        found = cm.Memory(patterns.half()).retrieve(x.half())
        assert found.state.dtype == torch.float16
        torch.testing.assert_close(
            found.state.float(), cm.Memory(patterns).retrieve(x).state, rtol=0.02, atol=0.02
        )

    def test_no_queries(self):
        patterns, x = patterns_and_states()
        found = cm.Memory(patterns).retrieve(x[:0], tol=1e-3)
        assert found.state.shape == (0, 6)
        assert found.energy.shape == (0,)


class TestEnergy:
    def test_formula_of_the_paper(self):
        patterns, x = patterns_and_states()
        beta, n = 0.7, len(patterns)
        lse = (beta * x @ patterns.mT).logsumexp(-1) / beta
        largest = patterns.norm(dim=-1).max()
        expected = -lse + (x * x).sum(-1) / 2 + math.log(n) / beta + largest**2 / 2
        torch.testing.assert_close(cm.Memory(patterns, beta).energy(x), expected)

    def test_zero_at_a_lone_pattern(self):
        x = torch.randn(1, 4)
        energy = cm.Memory(x).energy(x)
        assert 0 <= energy < 1e-5

    def test_gradient_is_state_minus_update(self):
        patterns, x = patterns_and_states()
        memory = cm.Memory(patterns, beta=0.7)
        x.requires_grad_()
        (g,) = torch.autograd.grad(memory.energy(x).sum(), x)
        torch.testing.assert_close(x - g, memory.retrieve(x).state)


class TestChanges:
    def test_add_replace_remove(self):
        patterns, x = patterns_and_states()
        values = torch.randn(12, 2, dtype=torch.float64)
        memory = cm.Memory(patterns[:8], values=values[:8])
        before = memory.retrieve(x)
        memory.add(patterns[8:], values[8:])
        assert len(memory) == 12
        expected = cm.Memory(patterns, values=values).retrieve(x)
        torch.testing.assert_close(memory.retrieve(x).value, expected.value)
        # what was found before the change still speaks of the memory as it was
        torch.testing.assert_close(before.energy, cm.Memory(patterns[:8]).energy(before.state))
        memory.replace([0, 3], patterns[:2] + 1, values[:2])
        torch.testing.assert_close(memory.patterns[3], patterns[1] + 1)
        torch.testing.assert_close(memory.values[3], values[1])
        torch.testing.assert_close(memory.patterns[4], patterns[4])
        memory.remove(torch.tensor([0, 11]))
        assert len(memory) == 10
        torch.testing.assert_close(memory.patterns[-1], patterns[10])
        assert patterns[0].abs().sum() > 0  # the caller's tensor is untouched

    def test_the_callers_tensor_stays(self):
        patterns, _ = patterns_and_states()
        copy = patterns.clone()
        memory = cm.Memory(patterns)
        memory.replace([1], torch.zeros(1, 6))
        memory.remove([0])
        assert torch.equal(patterns, copy)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda m: m.remove(range(4)), "at least one"),
            (lambda m: m.remove([4]), "between 0 and 3"),
            (lambda m: m.remove([-1]), "between 0 and 3"),
            (lambda m: m.remove([0, 0]), "twice"),
            (lambda m: m.remove([0.5]), "integers"),
            (lambda m: m.remove("first"), "integers"),
            (lambda m: m.replace([0], torch.zeros(2, 3)), "names 1 patterns, but 2"),
            (lambda m: m.add(torch.zeros(2, 4)), "like the stored"),
            (lambda m: m.add(torch.full((1, 3), math.nan)), "NaN"),
            (lambda m: m.add(torch.zeros(2, 3), torch.zeros(2, 3)), "no values"),
        ],
    )
    def test_bad_changes_change_nothing(self, change, message):
        memory = cm.Memory(torch.randn(4, 3))
        before = memory.patterns.clone()
        with pytest.raises(cm.InputError, match=message):
            change(memory)
        assert torch.equal(memory.patterns, before)


class TestFiles:
    def test_round_trip(self, tmp_path):
        patterns, x = patterns_and_states((3,), dtype=torch.float32)
        values = torch.randn(3, 12, 2)
        memory = cm.Memory(patterns, torch.tensor([0.5, 1.0, 2.0]), values=values)
        memory.save(tmp_path / "memory.safetensors")
        again = cm.Memory.load(tmp_path / "memory.safetensors")
        for name in ("patterns", "beta", "values"):
            assert torch.equal(getattr(again, name), getattr(memory, name))
        assert torch.equal(again.retrieve(x).value, memory.retrieve(x).value)

    def test_others_can_read_it(self, tmp_path):
        from safetensors.torch import load_file

        memory = cm.Memory(torch.randn(4, 3), beta=0.1)
        memory.save(tmp_path / "m.safetensors")
        got = load_file(tmp_path / "m.safetensors")
        assert torch.equal(got["patterns"], memory.patterns)
        assert float(got["beta"]) == pytest.approx(0.1)

    def test_number_stays_a_number_and_half_stays_half(self, tmp_path):
        cm.Memory(torch.randn(4, 3).bfloat16(), beta=0.1).save(tmp_path / "m")
        again = cm.Memory.load(tmp_path / "m")
        assert again.beta == 0.1
        assert again.retrieve(torch.zeros(1, 3).bfloat16()).state.dtype == torch.bfloat16

    def test_wrong_files(self, tmp_path):
        with pytest.raises(cm.InputError, match="no file"):
            cm.Memory.load(tmp_path / "nothing")
        (tmp_path / "text").write_text("hello")
        with pytest.raises(cm.InputError, match="not a safetensors file"):
            cm.Memory.load(tmp_path / "text")
        from safetensors.torch import save_file

        save_file({"patterns": torch.ones(2, 2)}, tmp_path / "other")
        with pytest.raises(cm.InputError, match=r"not written by Memory\.save"):
            cm.Memory.load(tmp_path / "other")
        with pytest.raises(cm.InputError, match="folder"):
            cm.Memory(torch.ones(2, 2)).save(tmp_path / "no" / "where")

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch):
        import safetensors.torch

        path = tmp_path / "m"
        memory = cm.Memory(torch.randn(4, 3))
        memory.save(path)

        def broken(*args, **kwargs):
            raise OSError("disk full")

        monkeypatch.setattr(safetensors.torch, "save_file", broken)
        with pytest.raises(cm.InputError, match="disk full"):
            cm.Memory(torch.randn(9, 3)).save(path)
        assert torch.equal(cm.Memory.load(path).patterns, memory.patterns)
        assert [p.name for p in tmp_path.iterdir()] == ["m"]


good = torch.randn(4, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cm.Memory(good, beta=-1.0), "beta"),
        (lambda: cm.Memory(good, beta=math.nan), "beta"),
        (lambda: cm.Memory(good, beta="hot"), "beta must be a number"),
        (lambda: cm.Memory(good, beta=torch.ones(2)), "broadcast to the sets"),
        (lambda: cm.Memory(good, beta=torch.tensor(-1.0)), "at least 0"),
        (lambda: cm.Memory(good[:0]), "at least 1"),
        (lambda: cm.Memory(good[0]), r"x\[None\]"),
        (lambda: cm.Memory(torch.full((2, 2), math.nan)), "NaN"),
        (lambda: cm.Memory(torch.full((2, 2), math.inf)), "infinity"),
        (lambda: cm.Memory(good, values=torch.ones(3, 1)), "one row for each pattern"),
        (lambda: cm.Memory(good).retrieve(torch.ones(2, 4)), "to meet patterns"),
        (lambda: cm.Memory(good).retrieve(torch.ones(3)), r"x\[None\]"),
        (lambda: cm.Memory(good).retrieve(good, -1), "steps"),
        (lambda: cm.Memory(good).retrieve(good, 1.5), "steps"),
        (lambda: cm.Memory(good).retrieve(good, tol=-1.0), "tol"),
        (lambda: cm.Memory(good).retrieve(good, step_size=0.0), "step_size"),
        (lambda: cm.Memory(good).retrieve(good * math.nan), "NaN"),
        (lambda: cm.Memory(good).error_bound(good, torch.tensor([0, 1, 2, 4])), "between 0 and 3"),
        (lambda: cm.Memory(good).error_bound(good, torch.tensor([0.5])), "integers"),
        (lambda: cm.Memory(good.expand(2, 4, 3)).energy(good.expand(3, 4, 3)), "broadcast"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(cm.InputError, match=message):
        call()
