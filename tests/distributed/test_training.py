"""The same small models, trained on one process and on three, end with the same parameters."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import cumulant as cm
from cumulant.contrastive import Temperature, info_nce
from cumulant.distributed import ShardedKeys, spread, total

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sharded_contrastive.py"

# How many of the 12 pairs each rank has.
SHARES = {1: [12], 3: [5, 3, 4]}
STEPS = 5


class Encoder(nn.Module):
    """Both sides of a batch of pairs, and the temperature, in one forward call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.temperature = Temperature(0.3)

    def forward(self, x, y):
        return (*self.layers(torch.cat([x, y])).chunk(2), self.temperature())


def encoder():
    torch.manual_seed(3)
    return Encoder().double()


def pairs(rank=0, size=1, shares=None):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    noise = torch.randn(12, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    counts = SHARES[size] if shares is None else shares
    start = sum(counts[:rank])
    return x[start : start + counts[rank]], (x + 0.3 * noise)[start : start + counts[rank]]


def trained(model, loss, optimizer="Adam", before_step=None):
    """Parameters by name after a few steps on `loss()`."""
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    for _ in range(STEPS):
        chosen.zero_grad()
        loss().backward()
        if before_step is not None:
            before_step()
        chosen.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def alone(optimizer="Adam"):
    model = encoder()

    def loss():
        x, y, t = model(*pairs())
        return info_nce(x, y, symmetric=True, temperature=t)

    return trained(model, loss, optimizer)


def same(found, expected):
    assert found.keys() == expected.keys()
    start = dict(encoder().named_parameters())
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=name)
        if name in start:
            assert not torch.allclose(x, start[name], rtol=1e-3), f"{name} did not move"


def under_ddp(group, rank, size, optimizer, shares, factor):
    model = encoder()
    wrapped = DistributedDataParallel(model, process_group=group)

    def loss():
        x, y, t = wrapped(*pairs(rank, size, shares))
        return factor * info_nce(x, y, symmetric=True, temperature=t, group=group)

    trained(model, loss, optimizer)
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_ddp_with_the_loss_times_the_number_of_ranks(crew, optimizer):
    """DDP takes the mean over ranks of gradients whose sum is wanted."""
    for found in crew.run(under_ddp, 3, optimizer, None, 3):
        same(found, alone(optimizer))


def test_ddp_where_a_rank_has_no_pairs(crew):
    for found in crew.run(under_ddp, 3, "SGD", [7, 0, 5], 3):
        same(found, alone("SGD"))


def test_ddp_without_the_factor_takes_shorter_steps(crew):
    """What the factor is there for: the test would notice it missing."""
    first = crew.run(under_ddp, 3, "SGD", None, 1)[0]
    with pytest.raises(AssertionError):
        same(first, alone("SGD"))


def under_fsdp(group, rank, size, how):
    model = encoder()
    mesh = DeviceMesh.from_group(group, "cpu")
    # A parameter of no dimension cannot be cut: the temperature stays whole, outside of FSDP.
    heat = model.temperature.log_value
    units = (model.layers[0], model.layers[2], model)
    for unit in units:
        fully_shard(unit, mesh=mesh, ignored_params={heat})
    if how == "sum":
        for unit in units:
            unit.set_gradient_divide_factor(1.0)

    def loss():
        x, y, t = model(*pairs(rank, size))
        if how == "sum":  # the temperature's gradient is whole, the loss as it is
            t = spread(t, group)
            return info_nce(x, y, symmetric=True, temperature=t, group=group)
        return size * info_nce(x, y, symmetric=True, temperature=t, group=group)

    def mean_of_heat():
        if how == "mean":
            heat.grad.copy_(total(heat.grad, group) / size)

    found = trained(model, loss, before_step=mean_of_heat)
    assert all(hasattr(p, "full_tensor") for n, p in found.items() if n.startswith("layers"))
    return {n: getattr(p, "full_tensor", p.clone)() for n, p in found.items()}


@pytest.mark.parametrize("how", ["sum", "mean"])
def test_fsdp2(crew, how):
    """Gradients summed over ranks; or their mean, and the loss times the number of ranks."""
    for found in crew.run(under_fsdp, 3, how):
        same(found, alone())


def bare(group, rank, size, how):
    model = encoder()

    def loss():
        if how == "spread":  # then every gradient is whole already
            shared = {n: spread(p, group) for n, p in model.named_parameters()}
            x, y, t = torch.func.functional_call(model, shared, pairs(rank, size))
        else:
            x, y, t = model(*pairs(rank, size))
        return info_nce(x, y, symmetric=True, temperature=t, group=group)

    def summed():
        for p in model.parameters() if how == "total" else ():
            p.grad = total(p.grad, group)

    return trained(model, loss, before_step=summed)


@pytest.mark.parametrize("how", ["total", "spread"])
def test_without_a_wrapper(crew, how):
    """Gradients are summed by hand after the backward pass, or within it."""
    for found in crew.run(bare, 3, how):
        same(found, alone())


class Reader(nn.Module):
    """Every rank asks the same queries of memories that live on all ranks."""

    def __init__(self, learned_keys) -> None:
        super().__init__()
        self.ask = nn.Linear(6, 4)
        self.scale = nn.Parameter(torch.tensor(0.8))
        # no bias: moving all keys alike changes nothing
        self.keys = nn.Linear(6, 4, bias=False) if learned_keys else nn.Identity()

    def forward(self, queries, facts, group):
        if isinstance(self.keys, nn.Identity):
            keys = facts[:, :4]
        elif group is None:
            keys = self.keys(facts)
        else:  # each rank's facts give a part of the gradient; spread makes it whole
            shared = {n: spread(p, group) for n, p in self.keys.named_parameters()}
            keys = torch.func.functional_call(self.keys, shared, facts)
        if group is None:
            return cm.attend(self.ask(queries), keys, facts, scale=self.scale).mean
        shard = ShardedKeys(keys, facts, group=group)
        return cm.attend(self.ask(queries), shard, scale=self.scale).mean


def reader(group, rank, size, learned_keys):
    torch.manual_seed(4)
    model = Reader(learned_keys).double()
    queries, goal = pairs()
    facts = pairs(rank, size)[1]
    called = model if group is None else DistributedDataParallel(model, process_group=group)
    gradients = []

    def loss():
        return ((called(queries, facts, group) - goal) ** 2).mean()

    def keep():
        gradients.append([p.grad.clone() for p in model.parameters()])

    if group is not None:  # before DDP's mean: what this rank itself has
        mine = torch.autograd.grad(
            ((model(queries, facts, group) - goal) ** 2).mean(), list(model.parameters())
        )
    found = trained(model, loss, before_step=keep)
    if group is not None:  # all ranks have the same whole gradient, so the mean changes nothing
        for x, y in zip(mine, gradients[0], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    return found


@pytest.mark.parametrize("learned_keys", [False, True])
def test_replicated_queries_under_ddp_need_no_factor(crew, learned_keys):
    expected = reader(None, 0, 1, learned_keys)
    for found in crew.run(reader, 3, learned_keys):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-10, atol=1e-10, msg=name)


def factors_of_sums(group, rank, size):
    """Factors by which torch's own sum gets derivatives of a replicated loss wrong."""
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    factors = []
    for add in (torch_sum, total):
        # L = S^2 / 2 of S = sum over ranks of (rank + 1) w, where every rank has its own w
        loss = add((rank + 1) * w, group) ** 2 / 2
        (first,) = torch.autograd.grad(loss, w, create_graph=True)
        (second,) = torch.autograd.grad(add(first, group), w)
        weights = size * (size + 1) / 2
        right = weights * 0.7 * (rank + 1), weights * (rank + 1)
        factors.append([first.item() / right[0], second.item() / right[1]])
    return factors


def torch_sum(x, group):
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x.clone(), group=group)


@pytest.mark.parametrize("size", [2, 3])
def test_torchs_sum_counts_a_replicated_loss_once_for_every_rank(crew, size):
    for theirs, ours in crew.run(factors_of_sums, size):
        assert ours == pytest.approx([1.0, 1.0], abs=1e-12)
        assert theirs == pytest.approx([size, size**2], abs=1e-12)


def losses(printed):
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", printed)]


def test_the_example_under_torchrun_prints_what_one_process_prints(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    expected = losses(capsys.readouterr().out)
    assert len(expected) >= 3
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    run = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLE)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert losses(run.stdout) == pytest.approx(expected, abs=2e-3)
