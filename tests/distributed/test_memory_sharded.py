"""A memory whose patterns live on ranks answers as one that has them all."""

from __future__ import annotations

import pytest
import torch

import cumulant as cm
from cumulant.core.errors import GroupError, InputError
from cumulant.distributed import ShardedKeys, total

KEYS = {1: [10], 2: [4, 6], 3: [7, 0, 3], 4: [2, 3, 1, 4]}
QUERIES = {1: [5], 2: [3, 2], 3: [2, 3, 0], 4: [1, 1, 2, 1]}


def part(counts, rank):
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def draw(*shape, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=atol)


def memories(group, rank, size, queries, beta=1.5, values=True):
    x, v = draw(10, 4, seed=1), draw(10, 3, seed=2)
    mine = part(KEYS[size], rank)
    full = [x.clone().requires_grad_(), v.clone().requires_grad_()]
    own = [y[mine].clone().requires_grad_() for y in (x, v)]
    shard = ShardedKeys(own[0], own[1] if values else None, group=group, queries=queries)
    whole = cm.Memory(full[0], beta, values=full[1] if values else None)
    return whole, cm.Memory(shard, beta), full, own, mine


def answers(group, rank, size, queries, beta=1.5):
    whole, ours, full, own, mine = memories(group, rank, size, queries, beta)
    state = draw(5, 4, seed=3)
    asked = slice(None) if queries == "replicated" else part(QUERIES[size], rank)
    s, t = state.clone().requires_grad_(), state[asked].clone().requires_grad_()
    assert len(ours) == 10
    close(ours.energy(t), whole.energy(s)[asked])
    for options in ({"steps": 3}, {"tol": 1e-9}, {"steps": 2, "step_size": 0.5}, {"steps": 0}):
        a, b = whole.retrieve(s, **options), ours.retrieve(t, **options)
        close(b.state, a.state[asked])
        close(b.energy, a.energy[asked])
        close(b.value, a.value[asked])
        assert b.steps.tolist() == a.steps[asked].tolist()
        assert b.converged.tolist() == a.converged[asked].tolist()
        assert b.index.tolist() == a.index[asked].tolist()
    one = queries == "replicated"
    a, b = whole.retrieve(s, 2), ours.retrieve(t, 2)
    expected = a.energy.sum() + a.state.sin().sum() + a.value.cos().sum()
    found = b.energy.sum() + b.state.sin().sum() + b.value.cos().sum()
    found = found if one else total(found, group)
    close(found, expected)
    first = torch.autograd.grad(expected, [s, *full], create_graph=True)
    mine_first = torch.autograd.grad(found, [t, *own], create_graph=True)
    cut = (asked, mine, mine)
    for x, y, c in zip(mine_first, first, cut, strict=True):
        close(x, y[c])
    square = sum((x**2).sum() for x in first)
    keyed = (mine_first[1] ** 2).sum() + (mine_first[2] ** 2).sum()
    asked_square = (mine_first[0] ** 2).sum()
    both = asked_square + total(keyed, group) if one else total(asked_square + keyed, group)
    second = torch.autograd.grad(square, [s, *full])
    mine_second = torch.autograd.grad(both, [t, *own])
    for x, y, c in zip(mine_second, second, cut, strict=True):
        close(x, y[c], atol=1e-10 * float(y.abs().max()))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("queries", ["replicated", "sharded"])
def test_retrieval_and_energy_with_gradients(crew, queries, size):
    crew.run(answers, size, queries)


@pytest.mark.parametrize("queries", ["replicated", "sharded"])
@pytest.mark.parametrize("beta", [0.0, 1e-9])
def test_uniform_weights(crew, queries, beta):
    """The energy takes another way there, the same on all ranks."""
    crew.run(answers, 3, queries, beta)


def bounds(group, rank, size, queries):
    whole, ours, *_, mine = memories(group, rank, size, queries, values=False)
    state = draw(5, 4, seed=3)
    asked = slice(None) if queries == "replicated" else part(QUERIES[size], rank)
    close(ours.separation(), whole.separation()[mine].detach())
    close(ours.error_bound(state[asked]), whole.error_bound(state)[asked])
    index = torch.tensor([9, 0, 4, 4, 7])
    found = ours.error_bound(state[asked], index[asked])
    close(found, whole.error_bound(state, index)[asked])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("queries", ["replicated", "sharded"])
def test_separation_and_error_bound(crew, queries, size):
    crew.run(bounds, size, queries)


def changes(group, rank, size):
    whole, ours, *_ = memories(group, rank, size, "replicated")
    state, x, v = draw(5, 4, seed=3), draw(2, 4, seed=5), draw(2, 3, seed=6)
    for memory in (whole, ours):
        memory.replace([1, 9], x, v)
        memory.remove([0, 8])
    close(ours.retrieve(state).value, whole.retrieve(state).value)
    assert ours.retrieve(state).index.tolist() == whole.retrieve(state).index.tolist()
    mine = rank == size - 1  # the last rank's patterns are the last ones
    ours.add(x if mine else x[:0], v if mine else v[:0])
    whole.add(x, v)
    assert len(ours) == len(whole) == 10
    close(ours.energy(state), whole.energy(state))
    beta = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    patterns, keys = draw(10, 4, seed=1), part(KEYS[size], rank)
    a = cm.Memory(patterns, beta).energy(state).sum()
    b = cm.Memory(ShardedKeys(patterns[keys], group=group), beta).energy(state).sum()
    close(*(torch.autograd.grad(y, beta)[0] for y in (b, a)))  # whole on every rank
    sets = draw(2, 10, 4, seed=8)
    a = cm.Memory(sets).retrieve(state, 2)
    b = cm.Memory(ShardedKeys(sets[:, keys], group=group)).retrieve(state, 2)
    close(b.state, a.state)
    close(b.energy, a.energy)
    assert b.index.tolist() == a.index.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_changes_a_learned_beta_and_sets(crew, size):
    crew.run(changes, size)


def refusals(group, rank, size):
    _, ours, *_ = memories(group, rank, size, "replicated")
    state = draw(5, 4, seed=3)
    for what in (ours.mixture, lambda: ours.save("nowhere")):
        with pytest.raises(InputError, match="spread over 2 ranks"):
            what()
    with pytest.raises(InputError if rank else GroupError, match=r"^energy|rank 1: energy"):
        ours.energy(state if rank == 0 else state[:, :3])
    with pytest.raises(InputError, match="at least one pattern"):
        ours.remove(list(range(10)))
    with pytest.raises(InputError, match="at least one rank"):
        cm.Memory(ShardedKeys(state[:0], group=group))
    with pytest.raises(InputError, match="pass values with sharded patterns"):
        cm.Memory(ShardedKeys(state, group=group), values=state)
    assert ours.energy(state).isfinite().all()


def test_what_needs_all_patterns_says_so(crew):
    crew.run(refusals, 2)
