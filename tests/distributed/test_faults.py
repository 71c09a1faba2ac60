"""Ranks that die, stall or disagree: the others stop with a clear error, in time, and never hang.

Those that are killed or stopped are processes started for it; the rest runs in the crew.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import cumulant as cm
from crew import environment, free_port
from cumulant.contrastive import info_nce
from cumulant.core.errors import GroupError, InputError
from cumulant.distributed import Ranks, ShardedKeys

TIMEOUT = 10.0  # of the groups
AT_ONCE = 5.0  # what a closed connection may take on a busy machine


class Team:
    """Processes in a group, each in a job that it never ends by itself.

    A job gets (rank, size, tell); what it tells comes to `heard`, and the error that ends it with
    the time at which it was raised.
    """

    def __init__(self, job, size, timeout=TIMEOUT):
        # A server that has imported torch once forks processes in no time.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed", "cumulant"])
        port = free_port()
        self.ends, self.processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_member, args=(job, rank, size, port, timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.ends.append(mine)
            self.processes.append(process)

    def heard(self, rank, patience=60.0):
        assert self.ends[rank].poll(patience), f"rank {rank} said nothing in {patience} s"
        return self.ends[rank].recv()

    def signal(self, rank, which):
        os.kill(self.processes[rank].pid, which)
        return time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.join()


def _member(job, rank, size, port, timeout, pipe):
    os.environ.update(environment(rank, size, port))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
        job(rank, size, pipe.send)
        pipe.send(("nothing", "the job came to its end", time.monotonic()))
    except BaseException as error:
        pipe.send((type(error).__name__, str(error), time.monotonic()))


def vectors(rank, n=6, d=4):
    random = torch.Generator().manual_seed(rank)
    return torch.randn(n, d, generator=random, dtype=torch.float64)


VICTIM = 1


def asking(rank, size, tell):
    """Attention again and again; its answers must be right as long as there are any."""
    query = vectors(100)
    right = cm.attend(query, torch.cat([vectors(r) for r in range(size)])).mean
    for k in range(10**9):
        mean = cm.attend(query, ShardedKeys(vectors(rank))).mean
        torch.testing.assert_close(mean, right, rtol=1e-10, atol=1e-10)
        if k == 3:
            tell("busy")


def sleep_in_backward(rank, tell):
    def hook(grad):
        if rank == VICTIM:
            tell("busy")
            time.sleep(1000.0)
        return grad

    return hook


def learning(rank, size, tell):
    """The backward pass of a loss, in which one rank never arrives."""
    x, y = vectors(rank).requires_grad_(), vectors(rank + 50).requires_grad_()
    loss = info_nce(x, y, group=dist.group.WORLD)
    loss.register_hook(sleep_in_backward(rank, tell))
    loss.backward()


def circling(rank, size, tell):
    """A ring, in the middle of which one rank passes nothing on."""
    if rank == VICTIM:
        passed = []
        pass_on = Ranks.pass_on

        def second_time_never(self, *arguments):
            passed.append(1)
            if len(passed) == 2:
                tell("busy")
                time.sleep(1000.0)
            return pass_on(self, *arguments)

        Ranks.pass_on = second_time_never
    shard = ShardedKeys(vectors(rank), queries="sharded", route="ring")
    cm.attend(vectors(rank + 50), shard).mean  # noqa: B018


def ended(team, rank, since, patience):
    """The message of the GroupError that ended a rank, and how long that took."""
    kind, message, when = team.heard(rank, patience)
    assert kind == "GroupError", message
    assert re.search(rf"failed on rank {rank} of {len(team.ends)} after \d+\.\d s", message)
    assert re.search("another rank has died|timeout expired while waiting", message)
    return message, when - since


@pytest.mark.parametrize(
    ("job", "size", "what"),
    [
        (asking, 4, "comparing input|a sum over ranks|a maximum over ranks"),
        (learning, 3, "a sum of rows"),
        (circling, 3, "passing keys around the ring"),
    ],
    ids=["attention", "backward", "ring"],
)
def test_when_a_rank_is_killed_the_others_stop_at_once(job, size, what):
    with Team(job, size) as team:
        for rank in range(size) if job is asking else [VICTIM]:
            assert team.heard(rank) == "busy"
        time.sleep(0.5)  # the others are waiting by now, or at work
        since = team.signal(VICTIM, signal.SIGKILL)
        for rank in set(range(size)) - {VICTIM}:
            message, took = ended(team, rank, since, TIMEOUT + 5.0)
            assert re.match(rf".*({what}) failed", message), message
            assert took < AT_ONCE, message


def test_when_a_rank_stalls_the_others_stop_after_the_timeout():
    with Team(asking, 3) as asked, Team(circling, 3) as circled:
        for rank in range(3):
            assert asked.heard(rank) == "busy"
        assert circled.heard(VICTIM) == "busy"
        stopped = [(team, team.signal(VICTIM, signal.SIGSTOP)) for team in (asked, circled)]
        for team, since in stopped:
            for rank in (0, 2):
                _, took = ended(team, rank, since, TIMEOUT + 10.0)
                assert TIMEOUT / 2 < took < 2 * TIMEOUT


def other_groups(rank, size, tell):
    wait = timedelta(seconds=TIMEOUT)
    part = dist.new_group([0, 1], timeout=wait)
    tell(time.monotonic())
    group = dist.group.WORLD if rank == 0 else part
    cm.attend(vectors(100), ShardedKeys(vectors(rank), group=group)).mean  # noqa: B018


def test_ranks_that_give_different_groups_stop_after_the_timeout():
    with Team(other_groups, 2) as team:
        since = max(team.heard(0), team.heard(1))
        for rank in range(2):
            message, took = ended(team, rank, since, TIMEOUT + 10.0)
            assert "with the same group" in message
            assert took < 2 * TIMEOUT


def works(group, rank, size):
    """Nothing that ranks refused has spoiled their group."""
    query = vectors(100)
    right = cm.attend(query, torch.cat([vectors(r) for r in range(size)])).mean
    found = cm.attend(query, ShardedKeys(vectors(rank), group=group)).mean
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def mine(rank, usual, other):
    """Something else on rank 1."""
    return other if rank == 1 else usual


def unlike(group, rank, size):
    x, query = vectors(rank), vectors(100)
    wide = x[None, None, None, None]
    began = time.monotonic()
    cases = [
        ("dtype of keys", r"float64 on rank 0, float32 on rank 1, float64 on rank 2", x.float()),
        ("features of keys", r"4 on rank 0, 3 on rank 1, 4 on rank 2", x[:, :3]),
        ("batch of keys", r"\(\) on rank 0, \(1,\) on rank 1, \(\) on rank 2", x[None]),
        ("whether keys requires? gradients", r"no on rank 0, yes on rank 1", x.clone()),
    ]
    cases[3][2].requires_grad_()
    for what, where, other in cases:
        with pytest.raises(InputError, match=f"ShardedKeys: .*{what}.*{where}"):
            ShardedKeys(mine(rank, x, other), group=group)
        what = what.replace("keys", "anchors")
        given = mine(rank, x, other)
        with pytest.raises(InputError, match=f"info_nce: .*{what}.*{where}"):
            info_nce(given, given, group=group)
    many = mine(rank, wide, wide.expand(2, -1, -1, -1, -1, -1))
    with pytest.raises(InputError, match="batch of keys"):
        ShardedKeys(many, group=group)
    shard = ShardedKeys(x, group=group)
    learned = query.clone().requires_grad_()
    for what, other in [
        ("whether query requires gradients", learned),
        ("batch of query", query[None]),
    ]:
        with pytest.raises(InputError, match=f"attend: .*{what}.* on rank 0, .* on rank 1"):
            cm.attend(mine(rank, query, other), shard)
    with pytest.raises(InputError, match=r"replicated queries must be the same .*\[6, 5, 6\]"):
        cm.attend(mine(rank, query, query[:5]), shard)
    # Input that this rank alone can tell is wrong: the others hear of it.
    kind = mine(rank, GroupError, InputError)
    with pytest.raises(kind, match=mine(rank, "It says: rank 1: .* one dtype", "^query.* one dty")):
        cm.attend(mine(rank, query, query.float()), shard)
    for options, what in [
        ({"is_causal": True}, "causal"),
        ({"window": (1, 1)}, "window"),
        ({"scale": 0.3}, "scale"),
        ({"scale": torch.tensor(0.3, requires_grad=True)}, "scale"),
        ({"scale": torch.ones(5, 1, dtype=torch.float64)}, "scale"),
    ]:
        with pytest.raises((InputError, GroupError), match=what):
            cm.attend(query, shard, **mine(rank, {}, options))
    for function in (cm.distributed.total, cm.distributed.spread):
        with pytest.raises(InputError, match=r"shape, but it is \(6, 4\) on rank 0, \(24,\) on"):
            function(mine(rank, x, x.flatten()), group)
        with pytest.raises(InputError, match="dtype"):
            function(mine(rank, x, x.float()), group)
    with pytest.raises(InputError, match="requires gradients"):
        cm.distributed.spread(mine(rank, x, learned), group)
    assert time.monotonic() - began < AT_ONCE
    works(group, rank, size)


def test_ranks_with_unlike_input_all_refuse_it_and_go_on(crew):
    crew.run(unlike, 3)


def fields(group, rank, size):
    began = time.monotonic()
    found = cm.attend(vectors(100), ShardedKeys(vectors(rank), group=group))
    name = mine(rank, "mean", "entropy")
    with pytest.raises(
        GroupError, match=r"different calls: rank 0 in .*\.mean, rank 1 in .*\.entropy"
    ):
        getattr(found, name)
    works(group, rank, size)
    shard = ShardedKeys(vectors(rank), group=group)
    for other in (
        lambda: info_nce(vectors(1), vectors(2), group=group),
        lambda: cm.distributed.total(vectors(1), group),
    ):
        call = mine(rank, lambda: cm.attend(vectors(100), shard), other)
        with pytest.raises(GroupError, match="different calls"):
            call()
    assert time.monotonic() - began < AT_ONCE
    works(group, rank, size)


def test_ranks_in_different_calls_all_stop_at_once(crew):
    crew.run(fields, 3)


def strangers(group, rank, size):
    few = dist.new_group([0, 1])
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("hosts", "cores"))
    with pytest.raises(InputError, match=r"one dimension of a device mesh.*mesh\['hosts'\]"):
        ShardedKeys(vectors(rank), group=mesh)
    with pytest.raises(InputError, match="one dimension of a device mesh"):
        info_nce(vectors(rank), vectors(rank), group=mesh)
    row = ShardedKeys(vectors(rank), group=mesh["cores"])
    assert row.ranks.size == 2
    assert row.ranks.rank == rank % 2
    if rank > 1:
        for call in (
            lambda: ShardedKeys(vectors(rank), group=few),
            lambda: info_nce(vectors(rank), vectors(rank), group=few),
            lambda: cm.distributed.total(vectors(rank), few),
        ):
            with pytest.raises(InputError, match="not in the given group"):
                call()
    else:
        works(few, rank, 2)
    with pytest.raises(InputError, match=r"must be a torch\.distributed process group"):
        ShardedKeys(vectors(rank), group=[0, 1])


def test_processes_outside_of_the_group_and_meshes_are_refused(crew):
    crew.run(strangers, 4)
