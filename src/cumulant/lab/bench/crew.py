"""Worker processes in one group, and a network of their own to watch and to throttle."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from cumulant.distributed import launched

__all__ = ["Crew", "end_with_parent", "private_network", "sent_on_loopback", "throttle"]


class Crew:
    """So many processes, one thread each, that run functions together."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._ends: list[Any] = []
        self._workers: list[Any] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(theirs, rank, size, port), daemon=True)
            worker.start()
            theirs.close()  # so that a worker that died is an end of file
            self._ends.append(mine)
            self._workers.append(worker)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank."""
        for end in self._ends:
            end.send((function, arguments))
        answers: list[Any] = []
        for rank, end in enumerate(self._ends):
            good, answer = end.recv()
            if not good:
                raise RuntimeError(f"rank {rank} of {len(self._ends)}: {answer}")
            answers.append(answer)
        return answers


def end_with_parent() -> None:
    """End this process soon after the one that started it, however that ended."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(pipe: Any, rank: int, size: int, port: int) -> None:
    end_with_parent()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with launched(timeout=120):
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                answer = True, function(*arguments)
            except Exception:
                answer = False, traceback.format_exc()
            pipe.send(answer)


def _succeeds(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def private_network() -> list[str]:
    """What to put before a command so that it has a loopback device to itself; or nothing."""
    prefix = ["unshare", "--map-root-user", "--net"]
    return prefix if _succeeds(*prefix, "ip", "link", "set", "lo", "up") else []


def sent_on_loopback() -> int:
    """Bytes that went over this network's loopback device, headers and all."""
    with open("/proc/self/net/dev") as lines:
        (numbers,) = (x.split(":")[1].split() for x in lines if x.strip().startswith("lo:"))
    return int(numbers[8])


def throttle(megabits: int | None) -> bool:
    """Let so much through per second, all ranks together, or everything; whether it worked.

    Only ever in a private network, whose loopback device nobody else uses.
    """
    if megabits is None:
        return _succeeds("tc", "qdisc", "del", "dev", "lo", "root")
    # Packets as on a network, so that little goes through at once on top of the rate.
    rate = ("rate", f"{megabits}mbit", "burst", "32kb", "latency", "2s")
    return _succeeds("ip", "link", "set", "lo", "mtu", "9000") and _succeeds(
        "tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *rate
    )
