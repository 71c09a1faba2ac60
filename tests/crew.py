"""A crew of processes in one torch.distributed group, which run functions of test modules together.

Starting a process that imports torch takes seconds, so one crew of four serves all tests: a
function runs on the first `size` of them, in a group of that size, and gets (group, rank, size,
*arguments). What it returns on each rank comes back as a list; if it raises, so does the test.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import sys
import traceback
from datetime import timedelta
from pathlib import Path

MOST = 4


class Crew:
    """Four processes, waiting for work."""

    def __init__(self, timeout: float = 30.0) -> None:
        self._timeout = timeout
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._ends = []
        self._processes = []
        for rank in range(MOST):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, rank, port, self._timeout), daemon=True
            )
            process.start()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, function, size, *arguments, patience=120.0):
        """`function` on the first `size` ranks; what it returned on each."""
        path = Path(sys.modules[function.__module__].__file__)
        for end in self._ends[:size]:
            end.send((str(path), function.__name__, size, arguments))
        answers = []
        for end in self._ends[:size]:
            there = end.poll(patience)
            answers.append(end.recv() if there else (False, f"no answer in {patience} s"))
        wrong = [f"rank {r} of {size}:\n{x}" for r, (good, x) in enumerate(answers) if not good]
        if wrong:  # the others may wait for one that is gone: a new crew for the next test
            self.close()
            self._start()
            raise AssertionError("\n".join(wrong))
        return [answer for _, answer in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def load(path: str):
    """A test module by its path, once."""
    name = Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _work(pipe, rank: int, port: int, timeout: float) -> None:
    os.environ.update(environment(rank, MOST, port))
    sys.path.insert(0, str(Path(__file__).parent))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    wait = timedelta(seconds=timeout)  # a new group does not inherit it
    groups = {n: dist.new_group(list(range(n)), timeout=wait) for n in range(1, MOST + 1)}
    while True:
        path, name, size, arguments = pipe.recv()
        try:
            torch.manual_seed(0)
            answer = getattr(load(path), name)(groups[size], rank, size, *arguments)
            pipe.send((True, answer))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
