"""Peak memory, measured in a child process: derivatives need memory linear in the length."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CHILD = """
import json, sys
import torch
import cumulant as cm

torch.set_num_threads(2)

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

kind, n, d = sys.argv[1], int(sys.argv[2]), 64
f = cm.scaled_dot_product_attention
small = [torch.randn(1, 1, 64, d, requires_grad=True) for _ in range(3)]
leaves = [torch.randn(1, 1, n, d, requires_grad=True) for _ in range(3)]
others = [torch.randn(1, 1, n, d) for _ in range(4)]

def run(leaves, tangents, seed):
    if kind == "jvp":
        torch.func.jvp(f, tuple(x.detach() for x in leaves), tuple(tangents))
    elif kind == "double backward":
        first = torch.autograd.grad(f(*leaves), leaves, seed, create_graph=True)
        torch.autograd.grad(first, leaves, tangents)
    elif kind == "third order":
        first = torch.autograd.grad(f(*leaves), leaves, seed, create_graph=True)
        second = torch.autograd.grad(first, leaves, tangents, create_graph=True)
        torch.autograd.grad(second, leaves, tangents)
    elif kind == "fields":
        a = cm.attend(*leaves)
        a.entropy, a.score_variance, a.log_normalizer

run(small, [torch.randn_like(x) for x in small], torch.randn(1, 1, 64, d))
before = status("VmRSS")
run(leaves, others[:3], others[3])
print(json.dumps(status("VmHWM") - before))
"""


def growth(kind: str, n: int) -> float:
    """Megabytes by which the peak exceeds what was held before the call."""
    out = subprocess.run(
        [sys.executable, "-c", CHILD, kind, str(n)], capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
@pytest.mark.parametrize("kind", ["jvp", "double backward", "fields"])
def test_below_128_megabytes_at_16384(kind):
    """The scores alone would be 1024 MB."""
    assert growth(kind, 16384) < 128


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_third_order_is_linear_too():
    """The scores alone would be 256 MB, and third order would hold many copies of them."""
    assert growth("third order", 8192) < 256
