"""Peak memory, measured in a child process: derivatives need memory linear in the length."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from cumulant.kernels.engines import engines
from cumulant.lab.bench.peak import growth as growth_of

CHILD = """
import json, sys
import torch
import cumulant as cm

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

kind, n, d = sys.argv[1], int(sys.argv[2]), 64
f = cm.scaled_dot_product_attention
small = [torch.randn(1, 1, 64, d, requires_grad=True) for _ in range(3)]
leaves = [torch.randn(1, 1, n, d, requires_grad=True) for _ in range(3)]
others = [torch.randn(1, 1, n, d) for _ in range(4)]
torch.set_num_threads(2 if kind == "jvp" else 1)

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
    elif kind == "key fields":
        a = cm.attend(*leaves, is_causal=True)
        total = a.received().square().sum() + a.score_max.sum() + a.top_keys(4).weights.sum()
        torch.autograd.grad(total + a.renyi(2.0).sum(), leaves[:2])
    elif kind == "rollout":
        layers = [cm.attend(x, y) for x, y in ((leaves[0], leaves[1]), (leaves[1], leaves[2]))]
        torch.autograd.grad(cm.rollout(layers, [0, -1]).square().sum(), leaves)
    elif kind == "sink":
        sink = leaves[0][..., 0]  # of each query
        a = cm.attend(*leaves, sink=sink, softcap=5.0, is_causal=True)
        torch.autograd.grad(a.mean.sum() + a.entropy.sum(), leaves)
    elif kind in ("relu2", "elu1"):
        out = cm.nn.similarity(kind)(*leaves, is_causal=True)
        torch.autograd.grad(out.sum(), leaves)
    elif kind == "half":
        cm.attend(halves[0][..., :64, :], halves[-1]).mean

halves = [small[0].detach().bfloat16()]
run(small, [torch.randn_like(x) for x in small], torch.randn(1, 1, 64, d))
halves.append(torch.ones(n, d, dtype=torch.bfloat16))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak of making the inputs
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
def test_a_sink_of_each_query_takes_no_matrix():
    """Value and gradient; as one more column of a bias, it would take 1024 MB several times."""
    assert growth("sink", 16384) < 256


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
@pytest.mark.parametrize("kind", ["key fields", "rollout"])
def test_received_mass_and_top_keys_take_no_matrix(kind):
    """Values and gradients; eager attention would hold several matrices of 1024 MB."""
    assert growth(kind, 16384) < 256


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
@pytest.mark.parametrize("kernel", ["relu2", "elu1"])
def test_other_kernels_take_no_matrix(kernel):
    """Value and gradient; one matrix of scores would be 256 MB."""
    assert growth(kernel, 8192) < 96


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_third_order_is_linear_too():
    """The scores alone would be 64 MB, and third order would hold dozens of copies of them."""
    assert growth("third order", 4096) < 192


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_half_precision_keys_that_are_values_are_widened_once():
    """In single precision they are 128 MB."""
    assert growth("half", 2**19) < 192


MEASURES = """
import json, sys
import torch
import cumulant as cm

torch.set_num_threads(1)

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

def run(kind, m, n, d):
    if kind == "link":
        h = cm.Empirical(torch.randn(n, d))
        mean = h.mean(0.2 * torch.randn(m, d))
        return lambda: h.link(mean)
    if kind == "link with gradient":
        x = torch.randn(n, d, requires_grad=True)
        mean = cm.Empirical(x.detach()).mean(0.2 * torch.randn(m, d)).requires_grad_()
        return lambda: cm.Empirical(x).link(mean).square().sum().backward()
    if kind == "large":
        h = cm.Empirical(torch.randn(n, d))
        eta = 0.3 * torch.randn(m, d)
        return lambda: (h.log_normalizer(eta), h.mean(eta), h.relative_entropy(eta),
                        h.fisher_vector_product(eta, eta), h.sample(eta[:512], 1))
    h = cm.GaussianMixture(torch.randn(n, d), torch.rand(n, d) + 0.5)
    eta = torch.randn(m, d) / d**0.5
    return lambda: (h.log_normalizer(eta), h.mean(eta))

kind, m, n, d = sys.argv[1], *map(int, sys.argv[2:])
run(kind, 16, 64, d)()
work = run(kind, m, n, d)
before = status("VmRSS")
work()
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
@pytest.mark.parametrize(
    ("kind", "m", "n", "d", "limit"),
    [
        # N x N would be 800 MB and M x N x d 640 to 2600 MB, in double precision.
        ("link", 1024, 10_000, 32, 300),
        ("link with gradient", 64, 10_000, 32, 300),
        # M x N would be 1000 MB.
        ("large", 2_500, 100_000, 8, 200),
        # M x N x d would be 4300 MB.
        ("mixture", 4096, 4096, 64, 150),
    ],
)
def test_measures_never_hold_the_product_of_points_and_parameters(kind, m, n, d, limit):
    arguments = [kind, *map(str, (m, n, d))]
    out = subprocess.run(
        [sys.executable, "-c", MEASURES, *arguments], capture_output=True, text=True, check=True
    )
    grown = json.loads(out.stdout)
    assert grown < limit, grown


DYNAMICS = """
import json, sys
import torch
import cumulant as cm

torch.set_num_threads(1)
D = cm.dynamics

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

def run(n, d):
    x = torch.randn(n, d)
    out = D.step(x, contraction=D.Sphere())
    D.expansion(x, out), D.clusters(out[:, :3]), D.participation_ratio(out)
    y = x.clone().requires_grad_()
    D.step(y, contraction=D.LayerNorm()).square().sum().backward()
    D.gaussianity(out[: n // 2, :3], draws=2)

run(64, int(sys.argv[2]))
before = status("VmRSS")
run(*map(int, sys.argv[1:]))
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_dynamics_are_linear_in_the_points():
    """N x N would be 1024 MB in single precision."""
    out = subprocess.run(
        [sys.executable, "-c", DYNAMICS, "16384", "16"], capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) < 250


STORES = """
import json, sys
import torch
import cumulant as cm

torch.set_num_threads(1)
C = cm.contrastive

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

def work(kind, n, d):
    q, k = (torch.randn(n, d, requires_grad=True) for _ in range(2))
    if kind == "info_nce":
        return lambda: C.info_nce(q, k).backward()
    if kind == "symmetric":
        return lambda: C.info_nce(q, k, symmetric=True).backward()
    if kind == "labels":
        labels = torch.arange(n) % 10
        return lambda: C.info_nce(q, q, labels=labels, exclude="self").backward()
    if kind == "details":
        return lambda: C.contrast(q.detach(), k.detach())
    if kind == "double backward":
        def twice():
            g = torch.autograd.grad(C.info_nce(q, k), (q, k), create_graph=True)
            torch.autograd.grad(sum((x**2).sum() for x in g), (q, k))
        return twice
    if kind == "classify":
        return lambda: cm.memory.classify(q, k)
    if kind == "separation":
        return lambda: cm.Memory(q.detach()).separation()
    if kind == "chunks":
        N = torch.nn
        net = N.Sequential(N.Linear(d, 4096), N.Tanh(), N.Linear(4096, 8))
        return lambda: C.encode_in_chunks(net, q, 128).sum().backward()
    memory = cm.Memory(torch.randn(n, d), beta=0.2)
    state = memory.patterns[:256] + 0.3 * torch.randn(256, d)[: len(memory)]
    def retrieve():
        found = memory.retrieve(state)
        assert (found.index == torch.arange(len(state))).all()
        assert (found.energy >= 0).all()
    return retrieve

kind, n, d = sys.argv[1], *map(int, sys.argv[2:])
work(kind, 300, d)()
run = work(kind, n, d)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # forget the peak of making the inputs
before = status("VmRSS")
run()
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
@pytest.mark.parametrize(
    ("kind", "n", "d", "limit"),
    [
        # N x N would be 1024 MB in single precision, and cross-entropy holds three of them.
        ("info_nce", 16384, 64, 130),
        ("symmetric", 16384, 64, 130),
        ("labels", 16384, 64, 130),
        ("details", 16384, 64, 100),
        ("classify", 16384, 16, 130),
        ("separation", 16384, 16, 60),
        # N x N would be 256 MB, and second derivatives would hold several.
        ("double backward", 8192, 64, 200),
        # The hidden layer of the whole batch would be 256 MB, and tanh keeps its output.
        ("chunks", 16384, 16, 60),
        # Scores of one batch of queries would be 1000 MB.
        ("a million patterns", 1_000_000, 128, 200),
    ],
)
def test_memory_and_contrast_never_hold_all_pairs(kind, n, d, limit):
    # Freed pieces go back to the system, so that what is measured is what was held at once.
    out = subprocess.run(
        [sys.executable, "-c", STORES, kind, str(n), str(d)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
    )
    grown = json.loads(out.stdout)
    assert grown < limit, grown


LENS = """
import json, sys
import torch, transformers
import cumulant as cm

torch.set_num_threads(1)

def status(field):
    with open("/proc/self/status") as f:
        return next(int(x.split()[1]) / 1024 for x in f if x.startswith(field))

n = int(sys.argv[1])
config = transformers.BertConfig(
    vocab_size=50, hidden_size=64, num_hidden_layers=1, num_attention_heads=8,
    intermediate_size=64, max_position_embeddings=n,
)
model = transformers.BertModel(config, add_pooling_layer=False).eval()

def run(length):
    with torch.no_grad(), cm.lens.observe(model, energy=True) as lens:
        model(torch.full((1, length), 7))

run(64)
before = status("VmRSS")
run(n)
print(json.dumps(status("VmHWM") - before))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_the_lens_keeps_no_weights():
    """8 heads of 4096 x 4096 weights would be 512 MB in single precision, at the least."""
    out = subprocess.run(
        [sys.executable, "-c", LENS, "4096"], capture_output=True, text=True, check=True
    )
    assert json.loads(out.stdout) < 128


@pytest.mark.skipif(sys.platform != "linux", reason="reads VmHWM, which only Linux reports")
def test_a_vocabulary_without_its_logits():
    """At 1024 x 16000 x 256 the gradients alone are 0.09 of the peak with logits."""
    ours, whole = (
        growth_of("cumulant.lab.bench.vocabulary", f"{x}_small") for x in ("ours", "whole")
    )
    assert ours < (0.12 if engines()["native"].available else 0.3) * whole
