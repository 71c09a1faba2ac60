"""Edges of the distributed part: huge masks, changed keys, refused calls, unlike options."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.distributed import DeviceMesh
from torch.distributed.tensor import distribute_tensor

import cumulant as cm
from cumulant.contrastive import info_nce
from cumulant.core.errors import GroupError, InputError
from cumulant.distributed import Ranks, ShardedKeys, gather, spread, total, traffic


def draw(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def part(counts, rank):
    start = sum(counts[:rank])
    return slice(start, start + counts[rank])


def hidden_by_numbers(group, rank, size, queries):
    """Masks made of the most negative number, on whole rows and on some keys."""
    counts = [3, 0, 4]
    mine, asked = part(counts, rank), slice(None)
    q, k, v = draw(3, 4, seed=1), draw(7, 4, seed=2), draw(7, 2, seed=3)
    if queries == "sharded":
        asked = slice(rank, rank + 1)
    for low in (-1e9, torch.finfo(torch.float32).min, torch.finfo(torch.float64).min):
        mask = torch.zeros(3, 7, dtype=torch.float64)
        mask[0] = low  # nothing to see: as if nothing were hidden
        mask[1, :5] = low
        whole = cm.attend(q, k, v, attn_mask=mask)
        shard = ShardedKeys(k[mine], v[mine], group=group, queries=queries)
        ours = cm.attend(q[asked], shard, attn_mask=mask[:, mine])
        for name in ("mean", "entropy", "log_normalizer", "value_variance", "score_variance"):
            close(getattr(ours, name), getattr(whole, name)[asked])


@pytest.mark.parametrize("queries", ["replicated", "sharded"])
def test_masks_made_of_huge_numbers(crew, queries):
    crew.run(hidden_by_numbers, 3, queries)


def test_merge_keeps_what_lies_below_a_huge_bias():
    v = torch.tensor([[0.0], [1.0], [1.0], [1.0]])
    k, mask = torch.zeros(4, 1), torch.full((1, 4), -1e9)
    parts = [
        cm.attend(torch.ones(1, 1), k[s], v[s], attn_mask=mask[:, s])
        for s in (slice(0, 1), slice(1, 2), slice(2, 4))
    ]
    found = cm.merge(cm.merge(parts[0], parts[1]), parts[2])
    assert float(found.mean) == pytest.approx(0.75)
    assert float(found.value_variance) == pytest.approx(0.1875)
    assert float(found.entropy.exp()) == pytest.approx(4.0)


@pytest.mark.parametrize("offset", [1e3, 1e6])
def test_variance_of_merged_values_far_from_zero(offset):
    q, k = draw(3, 4, seed=1).float(), draw(8, 4, seed=2).float()
    v = draw(8, 2, seed=3).float() + offset
    exact = cm.attend(q.double(), k.double(), v.double()).value_variance
    found = cm.merge(cm.attend(q, k[:3], v[:3]), cm.attend(q, k[3:], v[3:])).value_variance
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)


def far_from_zero(group, rank, size, how):
    """Single precision: what all values have in common costs no digits, on ranks as alone."""
    q = draw(6, 16, seed=1).float()
    k, v = draw(300, 16, seed=2).float() + 100, draw(300, 4, seed=3).float() + 1e4
    exact = cm.attend(q.double(), k.double(), v.double()).value_variance
    parts = [x.tensor_split(size)[rank] for x in (k, v)]
    found = cm.attend(q, ShardedKeys(*parts, group=group, **how)).value_variance
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "how", [{}, {"queries": "sharded", "route": "gather"}], ids=["replicated", "gather"]
)
def test_variance_of_values_far_from_zero_over_ranks(crew, how):
    crew.run(far_from_zero, 3, how)


def keys_that_change(group, rank, size):
    k = draw(4, 3, seed=rank)
    shard = ShardedKeys(k, group=group, queries="sharded", route="ring")
    q = draw(2, 3, seed=5)
    if rank == 0:
        k.resize_(2, 3)
    with pytest.raises(InputError if rank == 0 else GroupError, match=r"had 4 keys .* has 2 now"):
        cm.attend(q, shard)
    learned = ShardedKeys(draw(4, 3, seed=rank), group=group)
    if rank == 0:
        learned.keys.requires_grad_()
    with pytest.raises(InputError, match="whether keys requires gradients"):
        cm.attend(q, learned)
    k = draw(4, 3, seed=rank)
    found = cm.attend(q, ShardedKeys(k, group=group))
    if rank == 0:
        k.add_(1)
    with pytest.raises(InputError if rank == 0 else GroupError, match="changed in place"):
        found.mean  # noqa: B018
    q = draw(2, 3, seed=5).requires_grad_()
    found = cm.attend(q, ShardedKeys(draw(4, 3, seed=rank), group=group))
    with torch.set_grad_enabled(rank == 1), pytest.raises(InputError, match="gradients are"):
        found.mean  # noqa: B018
    assert found.mean.isfinite().all()


def test_keys_that_change_after_sharding(crew):
    crew.run(keys_that_change, 2)


def unlike_options(group, rank, size):
    x = draw(3, 4, seed=rank)
    unlike = {
        "agree on reduction": {"reduction": "mean" if rank else "sum"},
        "cosine": {"similarity": "dot" if rank else "cosine"},
        "temperature": {"temperature": 0.1 + rank},
    }
    for what, options in unlike.items():
        with pytest.raises(InputError, match=what):
            info_nce(x, x, **options, group=group)
    with pytest.raises(InputError if rank else GroupError, match="reduction must be"):
        info_nce(x, x, reduction="men" if rank else "mean", group=group)
    batch = draw(2, 3, 4, seed=rank)
    weights = torch.zeros(3) if rank else torch.zeros(2, 3)
    assert info_nce(batch, batch, log_weights=weights, group=group).isfinite()
    shard = ShardedKeys(x, group=group)
    with pytest.raises(InputError, match="the value of scale"):
        cm.attend(x, shard, scale=0.5 + rank)
    with pytest.raises(InputError, match="whether a scale is given"):
        cm.attend(x, shard, scale=0.5 if rank else None)
    with pytest.raises(InputError, match="the softcap"):
        cm.attend(x, shard, softcap=1.0 + rank)
    with pytest.raises(InputError, match="the sink"):
        cm.attend(x, shard, sink=0.0 if rank else None)
    with pytest.raises(InputError, match="the sink"):
        cm.attend(x, shard, sink=torch.zeros(3 if rank else 1))
    with pytest.raises(InputError if rank else GroupError, match="sink must be"):
        cm.attend(x, shard, sink=torch.zeros(5 if rank else 3))
    with pytest.raises((InputError, GroupError), match="dropout_p does not go with sharded keys"):
        cm.attend(x, shard, dropout_p=0.1)
    from torch.nn.attention import bias

    mask = bias.causal_lower_right(3, 6) if rank else bias.causal_upper_left(3, 6)
    with pytest.raises(InputError, match="causal bias"):
        cm.attend(x, shard, attn_mask=mask)
    memory = cm.Memory(shard)
    with pytest.raises(InputError, match="steps"):
        memory.retrieve(x[:1], steps=1 + rank)
    with pytest.raises(InputError, match="tol"):
        memory.retrieve(x[:1], steps=9, tol=0.1 if rank else None)
    for change in (lambda i: memory.remove([i]), lambda i: memory.replace([i], x[:1])):
        with pytest.raises(InputError, match="agree on index"):
            change(2 + rank)
    assert len(memory) == 6
    with pytest.raises(InputError if rank else GroupError, match="beta"):
        cm.Memory(shard, beta=-1.0 if rank else 1.0)
    with pytest.raises(InputError, match="shape"):
        total(torch.ones(2 + rank), group)
    for function in (total, spread, gather):
        with pytest.raises(InputError, match="tensor"):
            function([1.0], group)
    assert float(total(torch.ones(()), group)) == 2.0


def test_unlike_options_are_told_and_spoil_nothing(crew):
    crew.run(unlike_options, 2)


def different_questions(group, rank, size, queries):
    """Ranks that ask a memory different things, or of which one is refused, go on in step."""
    x = draw(4, 3, seed=rank)
    shard = ShardedKeys(x, group=group, queries=queries)
    memory, state = cm.Memory(shard), draw(2, 3, seed=7)
    answers = memory.retrieve(state)
    pairs = [
        (lambda: memory.energy(state), lambda: memory.retrieve(state)),
        (lambda: memory.energy(state), lambda: memory.error_bound(state)),
        (lambda: memory.replace([1], x[:1]), lambda: memory.remove([1])),
        (lambda: memory.add(x), lambda: memory.separation()),
        (lambda: answers.index, lambda: answers.energy),
        (lambda: memory.energy(state), lambda: cm.attend(state, shard)),
    ]
    for pair in pairs:
        with pytest.raises(GroupError, match="different calls: rank 0 in"):
            pair[rank]()
    assert len(memory) == 8
    for options in ({"index": torch.tensor([1, 2])}, {"fixed_point": state}):
        with pytest.raises(InputError, match=f"whether {next(iter(options))} is given"):
            memory.error_bound(state, **(options if rank else {}))
    with pytest.raises(InputError if rank else GroupError, match="with sharded patterns"):
        cm.Memory(shard, values=x if rank else None)
    with pytest.raises(InputError, match="the value of beta"):
        cm.Memory(shard, beta=1.0 + rank)
    if queries == "sharded":
        with pytest.raises(InputError if rank else GroupError, match="leaves the range"):
            memory.energy(state * 1e200 if rank else state)
    assert memory.energy(state).isfinite().all()


@pytest.mark.parametrize("queries", ["replicated", "sharded"])
def test_a_memory_whose_ranks_ask_for_different_things(crew, queries):
    crew.run(different_questions, 2, queries)


def refused_addition(group, rank, size):
    memory = cm.Memory(ShardedKeys(draw(4, 3, seed=rank), group=group))
    with pytest.raises(InputError, match="requires gradients"):
        memory.add(draw(2, 3, seed=9).requires_grad_(rank == 0))
    assert len(memory) == 8
    assert memory.patterns.shape == (4, 3)
    assert memory.retrieve(draw(1, 3, seed=4)).index.max() < 8


def test_a_refused_addition_changes_nothing(crew):
    crew.run(refused_addition, 2)


def equal_norms(group, rank, size):
    """The gradient of the largest norm is shared by all patterns that have it."""
    x = torch.nn.functional.one_hot(torch.arange(5) % 3, 3).double()
    mine = part([3, 2], rank)
    whole, own = x.clone().requires_grad_(), x[mine].clone().requires_grad_()
    state = draw(2, 3, seed=4)
    (expected,) = torch.autograd.grad(cm.Memory(whole).energy(state).sum(), whole)
    memory = cm.Memory(ShardedKeys(own, group=group))
    (found,) = torch.autograd.grad(memory.energy(state).sum(), own)
    close(found, expected[mine])


def test_gradient_of_the_energy_where_patterns_have_one_norm(crew):
    crew.run(equal_norms, 2)


def gradient_of_a_bound(group, rank, size):
    """In the patterns, for queries of every rank; D_i, which has no derivative, held fixed."""
    x, state, index = draw(6, 3, seed=1), draw(4, 3, seed=2), torch.tensor([5, 0, 3, 2])
    counts, mine = [2, 4], part([2, 4], rank)
    asked = part([3, 1], rank)
    whole = x.clone().requires_grad_()
    gaps = cm.Memory(x).separation()[index]
    M = torch.linalg.vector_norm(whole, dim=-1).amax()
    radius = torch.linalg.vector_norm(state - whole[index], dim=-1)
    bound = 2 * 5 * M * (-0.1 * (gaps - 2 * M * radius)).exp()
    (expected,) = torch.autograd.grad(bound.sum(), whole)
    own = x[mine].clone().requires_grad_()
    memory = cm.Memory(ShardedKeys(own, group=group, queries="sharded"), beta=0.1)
    found = memory.error_bound(state[asked], index[asked])
    close(found, bound[asked])
    (gradient,) = torch.autograd.grad(total(found.sum(), group), own)
    close(gradient, expected[mine])
    assert sum(counts) == 6


def test_gradient_of_the_error_bound(crew):
    crew.run(gradient_of_a_bound, 2)


def one_rank_only(group, rank, size):
    """What one rank alone does, and the others hear of at once."""
    x, query = draw(3, 4, seed=rank), draw(2, 4, seed=5)
    huge = x * 1e300 if rank else x
    with pytest.raises(InputError if rank else GroupError, match="left the range"):
        info_nce(huge, x * 1e20, similarity="dot", reduction="none", group=group)
    with pytest.raises(InputError if rank else GroupError, match="temperature must be"):
        info_nce(x, x, temperature=10**400 if rank else 0.1, group=group)
    with torch.set_grad_enabled(rank == 0), pytest.raises(InputError, match="gradients"):
        info_nce(x, x, similarity="dot", temperature=1.0, group=group)
    for function in (total, spread, gather):
        with torch.set_grad_enabled(rank == 0), pytest.raises(InputError, match="gradients are"):
            function(x, group)
    shard = ShardedKeys(x, group=group)
    with pytest.raises(InputError if rank else GroupError, match="have their values"):
        cm.attend(query, shard, x if rank else None)
    with pytest.raises(InputError, match="the window to the left"):
        cm.attend(query, shard, window=(2**70 if rank else 1, 1))
    nested = torch.nested.nested_tensor([x, x])
    with pytest.raises(InputError if rank else GroupError, match="not a nested one"):
        ShardedKeys(nested if rank else x, group=group)
    with torch.autocast("cpu", enabled=rank == 0), pytest.raises(InputError, match="autocast"):
        cm.attend(query.float(), ShardedKeys(x.float(), group=group))
    with forward_ad.dual_level():
        moved = forward_ad.make_dual(x, x) if rank else x
        for call in (
            lambda: ShardedKeys(moved, group=group),
            lambda: info_nce(moved, moved, group=group),
            lambda: total(moved, group),
            lambda: spread(moved, group),
        ):
            with pytest.raises(InputError, match="carries a tangent"):
                call()
    mesh = DeviceMesh.from_group(group, "cpu")
    for other, why in (
        (distribute_tensor(x, mesh), "DTensor"),
        (x.to_sparse(), "dense"),
        (x.to("meta"), "hold numbers"),
    ):
        for call in (lambda y: ShardedKeys(y, group=group), lambda y: total(y, group)):
            with pytest.raises(InputError if rank else GroupError, match=why):
                call(other if rank else x)
    assert float(total(torch.ones(()), group)) == size


def test_what_one_rank_alone_does(crew):
    crew.run(one_rank_only, 2)


def ring_with_other_defaults(group, rank, size):
    """The dtype that tensors have by default is each process' own affair."""
    q, k = draw(2, 4, seed=rank), draw(3, 4, seed=10 + rank)
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    try:
        shard = ShardedKeys(k, group=group, queries="sharded", route="ring")
        found = cm.attend(q.requires_grad_(), shard, is_causal=True)
        total(found.mean.sin().sum(), group).backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert q.grad.isfinite().all()


def test_a_ring_of_ranks_with_different_default_dtypes(crew):
    crew.run(ring_with_other_defaults, 2)


def compiled(group, rank, size, way):
    """Compiled code leaves what ranks say to each other as it is."""
    how = {} if way == "replicated" else {"queries": "sharded", "route": way}
    k = draw(3, 4, seed=rank).requires_grad_()
    q = draw(2, 4, seed=9 if way == "replicated" else 20 + rank)

    def loss(k):
        found = cm.attend(q, ShardedKeys(k, group=group, **how)).mean.sin().sum()
        return found if way == "replicated" else total(found, group)

    (expected,) = torch.autograd.grad(loss(k), k)
    (found,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(k), k)
    close(found, expected)


def test_compiled_losses(crew):
    for way in ("replicated", "gather", "ring"):
        crew.run(compiled, 2, way)


def counted(group, rank, size):
    with traffic() as outer:
        with traffic() as inner:
            pass
        total(torch.ones(3), Ranks(group))
    assert inner.bytes == 0
    assert outer.bytes == 12.0  # 2 (P - 1) / P of three numbers of four bytes
    assert outer.calls == 1


def test_counters_nest(crew):
    crew.run(counted, 2)


def test_without_a_group_under_torchrun_nothing_pretends(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="init_process_group"):
        ShardedKeys(torch.ones(2, 2))
