"""torch's function and ours: same semantics, same operator, every extra where torch has none."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import cumulant as cm

INF = float("inf")


def qkv(batch=(2, 4), m=5, n=7, d=8, e=None, dtype=torch.float64, heads=None):
    q = torch.randn(*batch, m, d, dtype=dtype, requires_grad=True)
    inner = batch if heads is None else (*batch[:-1], heads)
    k = torch.randn(*inner, n, d, dtype=dtype, requires_grad=True)
    v = torch.randn(*inner, n, e or d, dtype=dtype, requires_grad=True)
    return q, k, v


def math_attention(*args, **kwargs):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


def assert_same(args, options, *, wrt=None, tolerance=1e-12):
    """Value, gradient and second gradient equal those of torch's math backend."""
    wrt = wrt or [x for x in args if x is not None and x.requires_grad]
    results = []
    for function in (cm.scaled_dot_product_attention, math_attention):
        out = function(*args, **options)
        first = torch.autograd.grad(out.sin().sum(), wrt, create_graph=True)
        second = torch.autograd.grad(sum(x.sin().sum() for x in first), wrt)
        results.append([out, *first, *second])
    for ours, theirs in zip(*results, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance * (1 + theirs.abs().max().item())
        )


@pytest.mark.parametrize("batch", [(), (3,), (2, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("e", [8, 3])
def test_plain_and_causal(batch, causal, e):
    assert_same(qkv(batch, e=e), {"is_causal": causal})


@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (9, 1), (7, 5)])
def test_lengths(lengths):
    assert_same(qkv(m=lengths[0], n=lengths[1]), {"is_causal": True})


@pytest.mark.parametrize(
    "shape", [(5, 7), (1, 7), (5, 1), (1, 1), (4, 5, 7), (4, 1, 7), (2, 1, 1, 7), (2, 4, 5, 7)]
)
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_broadcast_in_every_dimension(shape, kind):
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    if kind == "additive":
        mask = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    q, k, v = qkv()
    # torch's own math backend wants the mask's rank; broadcasting it first is the definition
    results = []
    wrt = [q, k, v] + ([mask] if kind == "additive" else [])
    for function, m in (
        (cm.scaled_dot_product_attention, mask),
        (math_attention, mask.expand(2, 4, 5, 7)),
    ):
        out = function(q, k, v, m)
        results.append([out, *torch.autograd.grad(out.sin().sum(), wrt)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_mask_of_one_dimension():
    q, k, v = qkv()
    mask = torch.tensor([True, False, True, True, False, True, True])
    expected = math_attention(q, k, v, mask.expand(5, 7))
    torch.testing.assert_close(cm.scaled_dot_product_attention(q, k, v, mask), expected)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("mask", [None, "causal", (2, 1, 5, 7), (2, 4, 5, 7), (5, 7)], ids=str)
def test_grouped_queries(heads, mask):
    bias = torch.randn(mask, dtype=torch.float64) if isinstance(mask, tuple) else None
    options = {"enable_gqa": True, "is_causal": mask == "causal"}
    assert_same((*qkv(heads=heads), bias), options)


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)])
def test_causal_bias_objects(variant, lengths):
    m, n = lengths
    q, k, v = qkv(m=m, n=n)
    diagonal = 0 if variant is causal_upper_left else n - m
    mask = torch.ones(m, n, dtype=torch.bool).tril(diagonal)
    seen = mask.any(-1)
    ours = cm.scaled_dot_product_attention(q, k, v, variant(m, n))
    theirs = math_attention(q, k, v, mask)
    torch.testing.assert_close(ours[..., seen, :], theirs[..., seen, :])
    assert (ours[..., ~seen, :] == 0).all()


@pytest.mark.parametrize("scale", [0.3, 2, torch.tensor(0.3, dtype=torch.float64)])
def test_scale(scale):
    q, k, v = qkv()
    expected = math_attention(q, k, v, scale=float(scale))
    torch.testing.assert_close(cm.scaled_dot_product_attention(q, k, v, scale=scale), expected)


def test_strides_do_not_matter():
    q, k, v = (x.detach() for x in qkv())
    odd = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        k.mT.contiguous().mT,
        v.expand(2, 4, 7, 8)[..., ::1].flip(0).flip(0),
    ]
    q2 = torch.stack([q, q], -1)[..., 0]
    expected = math_attention(q, k, v)
    torch.testing.assert_close(cm.scaled_dot_product_attention(*odd), expected)
    torch.testing.assert_close(cm.scaled_dot_product_attention(q2, k, v), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_in_and_out(dtype):
    q, k, v = qkv(dtype=dtype)
    out = cm.scaled_dot_product_attention(q, k, v)
    assert out.dtype == dtype
    grads = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(g.dtype == dtype for g in grads)
    exact = math_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_autocast_matches_torch_in_dtype_and_is_closer_in_value():
    q, k, v = (x.detach() for x in qkv(dtype=torch.float32))
    exact = math_attention(q.double(), k.double(), v.double())
    with torch.autocast("cpu", torch.bfloat16):
        ours = cm.scaled_dot_product_attention(q, k, v)
        theirs = F.scaled_dot_product_attention(q, k, v)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours - exact).abs().max() <= (theirs - exact).abs().max() + 1e-3


def operators(function):
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        function()
    return {event.key for event in recorded.key_averages()}


FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(16, 16)}], ids=str
)
def test_the_same_fused_operator_runs(options, engine):
    if engine != "torch":
        pytest.skip("the compiled engine is no operator of torch")
    q, k, v = qkv(m=16, n=16, dtype=torch.float32)

    def step(function):
        out = function(q, k, v, **options)
        torch.autograd.grad(out.sum(), (q, k, v))

    ours = operators(lambda: step(cm.scaled_dot_product_attention))
    theirs = operators(lambda: step(F.scaled_dot_product_attention))
    for name in (FUSED, FUSED + "_backward"):
        assert name in theirs
        assert name in ours
    assert "aten::bmm" not in ours


class TestDropout:
    def test_mean_and_variance_are_those_of_dropout(self):
        """Output of uniform attention over ones: mean 1, variance p / ((1 - p) N)."""
        n, p = 3000, 0.3
        ones = torch.ones(1, n, 1)
        out = cm.scaled_dot_product_attention(torch.zeros(2000, 1), ones[0] * 0, ones[0], None, p)
        assert abs(out.mean() - 1) < 5 * (p / (1 - p) / n / 2000) ** 0.5
        assert abs(out.var() / (p / (1 - p) / n) - 1) < 0.15

    def test_pairs_are_independent(self):
        """Kept or not is uncorrelated between neighbouring queries and between heads."""
        n = 400
        value = torch.eye(n)
        q = torch.zeros(2, n, 1)
        kept = cm.scaled_dot_product_attention(q, q[:, :n], value.expand(2, n, n), None, 0.5) > 0
        x = kept.double() - 0.5
        for other in (x[:, 1:] * x[:, :-1], x[..., 1:] * x[..., :-1], x[:1] * x[1:]):
            assert abs(other.mean()) < 5 * 0.25 / other.numel() ** 0.5

    def test_seed_decides(self):
        q, k, v = qkv()
        outs = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(cm.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        assert torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])

    @pytest.mark.usefixtures("small_tiles")
    def test_all_derivatives_see_one_mask(self):
        """With the mask read off a first run, dense attention under it has equal derivatives."""
        n = 6
        q, k, v = qkv((2,), m=4, n=n, d=3, e=n)
        torch.manual_seed(5)
        with torch.no_grad():
            eye = torch.eye(n, dtype=torch.float64).expand(2, n, n)
            weights = cm.scaled_dot_product_attention(q, k, eye, dropout_p=0.4)
            plain = (q @ k.mT / 3**0.5).softmax(-1)
            keep = (weights / plain).round(decimals=6)
        assert set(keep.unique().tolist()) <= {0.0, round(1 / 0.6, 6)}

        def ours(q, k, v):
            torch.manual_seed(5)
            return cm.scaled_dot_product_attention(q, k, v, dropout_p=0.4)

        def dense(q, k, v):
            return ((q @ k.mT / 3**0.5).softmax(-1) * (keep > 0) / 0.6) @ v

        tangents = tuple(torch.randn_like(x) for x in (q, k, v))
        for f, g in ((ours, dense),):
            a = torch.func.jvp(f, (q, k, v), tangents)
            b = torch.func.jvp(g, (q, k, v), tangents)
            for x, y in zip(a, b, strict=True):
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
        results = []
        for f in (ours, dense):
            first = torch.autograd.grad(f(q, k, v).sin().sum(), (q, k, v), create_graph=True)
            second = torch.autograd.grad(
                sum(x.sin().sum() for x in first), (q, k, v), create_graph=True
            )
            third = torch.autograd.grad(sum(x.sin().sum() for x in second), (q, k, v))
            results.append([*first, *second, *third])
        for x, y in zip(*results, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-10)

    def test_checkpoint_recomputes_the_same_mask(self):
        q, k, v = qkv()

        def block(q):
            return cm.scaled_dot_product_attention(q, k, v, dropout_p=0.4).sin()

        grads = []
        for run in (
            block,
            lambda q: checkpoint(block, q, use_reentrant=False),
            lambda q: checkpoint(block, q, use_reentrant=True),
        ):
            leaf = q.detach().requires_grad_()
            torch.manual_seed(3)
            run(leaf).sum().backward()  # reentrant checkpoints know only .backward()
            grads.append(leaf.grad)
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])

    def test_ends_of_the_range(self):
        q, k, v = qkv()
        assert (cm.scaled_dot_product_attention(q, k, v, dropout_p=1.0) == 0).all()
        torch.testing.assert_close(
            cm.scaled_dot_product_attention(q, k, v, dropout_p=0.0), math_attention(q, k, v)
        )

    def test_vmap_randomness_follows_torch(self):
        q, k, v = (x.detach() for x in qkv((2,)))
        run = lambda q: cm.scaled_dot_product_attention(q, k[0], v[0], dropout_p=0.5)
        twice = q[:1].expand(2, 5, 8)
        with pytest.raises(RuntimeError, match="random"):
            torch.func.vmap(run)(twice)
        same = torch.func.vmap(run, randomness="same")(twice)
        assert torch.equal(same[0], same[1])
        different = torch.func.vmap(run, randomness="different")(twice)
        assert not torch.equal(different[0], different[1])


class TestNested:
    def nested(self, lengths, heads=2, d=4):
        parts = [torch.randn(n, heads, d, dtype=torch.float64) for n in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    @pytest.mark.parametrize("causal", [False, True])
    def test_jagged_equals_each_sequence_alone(self, causal):
        lengths = [3, 1, 6]
        x = self.nested(lengths)
        q = x.transpose(1, 2)
        out = cm.scaled_dot_product_attention(q, q, q, is_causal=causal)
        for i, part in enumerate(out.unbind()):
            alone = x.unbind()[i].transpose(0, 1)
            expected = math_attention(alone, alone, alone, is_causal=causal)
            torch.testing.assert_close(part, expected)

    def test_gradient_flows(self):
        x = self.nested([3, 2])
        q = x.transpose(1, 2)
        out = cm.scaled_dot_product_attention(q, q, q)
        (grad,) = torch.autograd.grad(out.values().sin().sum(), x)
        alone = [p.detach().requires_grad_() for p in x.unbind()]
        total = sum(math_attention(*[p.transpose(0, 1)] * 3).sin().sum() for p in alone)
        expected = torch.autograd.grad(total, alone)
        torch.testing.assert_close(grad.values(), torch.cat(expected))

    def test_sequences_with_holes_or_of_other_lengths_are_refused(self):
        x = torch.randn(2, 6, 2, 4)
        lengths = torch.tensor([3, 6])
        holed = torch.nested.narrow(x, 1, torch.tensor([0, 0]), lengths, layout=torch.jagged)
        q = holed.transpose(1, 2)
        with pytest.raises(cm.InputError, match="holes"):
            cm.scaled_dot_product_attention(q, q, q)
        k, v = (self.nested(n).transpose(1, 2) for n in ([2, 4], [4, 2]))
        with pytest.raises(cm.InputError, match="same lengths"):
            cm.scaled_dot_product_attention(k, k, v)

    def test_jagged_in_the_wrong_dimension_is_refused(self):
        x = self.nested([3, 2])
        with pytest.raises(cm.InputError, match="transpose"):
            cm.scaled_dot_product_attention(x, x, x)

    def test_mixed_with_plain_tensors_is_refused(self):
        q = self.nested([3, 2]).transpose(1, 2)
        plain = torch.randn(2, 2, 4, 4, dtype=torch.float64)
        with pytest.raises(cm.InputError, match="must all be jagged"):
            cm.scaled_dot_product_attention(q, plain, plain)


class TestReplaced:
    def test_restores_nests_and_survives_exceptions(self):
        original = F.scaled_dot_product_attention
        fast = torch.backends.mha.get_fastpath_enabled()
        with cm.sdpa_replaced():
            assert F.scaled_dot_product_attention is not original
            with pytest.raises(ZeroDivisionError), cm.sdpa_replaced():
                raise ZeroDivisionError
            assert F.scaled_dot_product_attention is not original
            assert not torch.backends.mha.get_fastpath_enabled()
        assert F.scaled_dot_product_attention is original
        assert torch.backends.mha.get_fastpath_enabled() == fast

    def test_other_threads_keep_torchs_own(self):
        """Forward mode fails with torch's fused function and works with ours: a witness."""
        q = torch.randn(1, 1, 8, 4)
        outcome = {}
        inside, done = threading.Event(), threading.Event()

        def witness():
            try:
                f = lambda q: F.scaled_dot_product_attention(q, q, q)
                torch.func.jvp(f, (q,), (q,))
                return "ours"
            except (RuntimeError, NotImplementedError):
                return "torch"

        def outsider():
            inside.wait(60)
            outcome["outsider"] = witness()
            done.set()

        thread = threading.Thread(target=outsider)
        thread.start()
        with cm.sdpa_replaced():
            inside.set()
            done.wait(60)
            outcome["insider"] = witness()
        thread.join()
        assert outcome == {"outsider": "torch", "insider": "ours"}

    def test_other_threads_keep_torchs_causal_bias(self):
        q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)
        bias, found = causal_lower_right(3, 5), []
        expected = F.scaled_dot_product_attention(q, k, k, attn_mask=bias)

        def outsider():
            found.append(F.scaled_dot_product_attention(q, k, k, attn_mask=bias))

        with cm.sdpa_replaced():
            thread = threading.Thread(target=outsider)
            thread.start()
            thread.join()
        assert torch.equal(found[0], expected)

    def test_left_in_another_thread_than_entered(self):
        original = F.scaled_dot_product_attention
        context = cm.sdpa_replaced()
        thread = threading.Thread(target=context.__enter__)
        thread.start()
        thread.join()
        context.__exit__(None, None, None)
        assert F.scaled_dot_product_attention is original
        with cm.sdpa_replaced():
            q = torch.randn(1, 1, 8, 4)
            torch.func.jvp(lambda q: F.scaled_dot_product_attention(q, q, q), (q,), (q,))

    def test_overlapping_threads_restore_in_any_order(self):
        original = F.scaled_dot_product_attention
        first_in, second_in, first_out = (threading.Event() for _ in range(3))

        def one():
            with cm.sdpa_replaced():
                first_in.set()
                second_in.wait(60)
            first_out.set()

        def two():
            first_in.wait(60)
            with cm.sdpa_replaced():
                second_in.set()
                first_out.wait(60)

        threads = [threading.Thread(target=f) for f in (one, two)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert F.scaled_dot_product_attention is original

    def test_encoder_inference_shortcut_is_bypassed(self):
        layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
        encoder = torch.nn.TransformerEncoder(layer, 2).eval()
        x = torch.randn(2, 5, 8)
        seen = []

        def spy(*args, **kwargs):
            seen.append(1)
            return original(*args, **kwargs)

        with torch.no_grad():
            expected = encoder(x)
            with cm.sdpa_replaced():
                from cumulant.attention import sdpa

                original = sdpa.scaled_dot_product_attention
                sdpa.scaled_dot_product_attention = spy
                try:
                    ours = encoder(x)
                finally:
                    sdpa.scaled_dot_product_attention = original
        assert len(seen) == 2
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_inside_compiled_code():
    q, k, v = qkv()

    def f(q, k, v):
        out = cm.scaled_dot_product_attention(q.sin(), k, v, is_causal=True).cos()
        return out.sum() + cm.attend(q, k, v).entropy.sum()

    results = []
    for function in (f, torch.compile(f, backend="aot_eager")):
        out = function(q, k, v)
        results.append([out, *torch.autograd.grad(out, (q, k, v))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("field", ["mean", "entropy"])
def test_compiled_around_a_functional_gradient(field):
    q, k, v = (x.detach() for x in qkv())

    def slope(q):
        return torch.func.grad(lambda q: getattr(cm.attend(q, k, v), field).sum())(q)

    torch.testing.assert_close(torch.compile(slope, backend="aot_eager")(q), slope(q))


BAD = {
    "dropout kind": (lambda q, k, v: ((q, k, v), {"dropout_p": None}), r"\[0, 1\]"),
    "complex scale": (lambda q, k, v: ((q, k, v), {"scale": torch.ones(()) * 1j}), "real"),
    "scale kind": (lambda q, k, v: ((q, k, v), {"scale": "a"}), "finite number"),
    "complex": (lambda q, k, v: ((q + 0j, k, v), {}), "real"),
    "features": (lambda q, k, v: ((q, k[..., :3], v), {}), "same number of features"),
    "lengths": (lambda q, k, v: ((q, k[..., :3, :], v), {}), "same length"),
    "dtypes": (lambda q, k, v: ((q, k.float(), v), {}), "one dtype"),
    "integers": (lambda q, k, v: ((q.long(), k, v), {}), "floating point"),
    "devices": (lambda q, k, v: ((q, k.to("meta"), v), {}), "one device"),
    "one dimension": (lambda q, k, v: ((q[0, 0, 0], k, v), {}), "length, features"),
    "not a tensor": (lambda q, k, v: (([1.0], k, v), {}), "must be a torch.Tensor"),
    "mask shape": (lambda q, k, v: ((q, k, v, torch.ones(5, 6) > 0), {}), "must broadcast"),
    "mask grows": (lambda q, k, v: ((q, k, v, torch.ones(9, 1, 1, 5, 7) > 0), {}), "broadcast"),
    "mask dtype": (lambda q, k, v: ((q, k, v, torch.ones(5, 7).long()), {}), "boolean"),
    "mask precision": (lambda q, k, v: ((q, k, v, torch.ones(5, 7).half()), {}), "dtype"),
    "mask device": (lambda q, k, v: ((q, k, v, torch.ones(5, 7).to("meta")), {}), "device"),
    "mask kind": (lambda q, k, v: ((q, k, v, "causal"), {}), "attn_mask must be a tensor"),
    "causal and mask": (
        lambda q, k, v: ((q, k, v, torch.ones(5, 7) > 0), {"is_causal": True}),
        "exclude each other",
    ),
    "dropout": (lambda q, k, v: ((q, k, v), {"dropout_p": -0.1}), r"\[0, 1\]"),
    "dropout above": (lambda q, k, v: ((q, k, v), {"dropout_p": 1.1}), r"\[0, 1\]"),
    "heads": (lambda q, k, v: ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}), "multiple"),
    "heads differ": (lambda q, k, v: ((q, k, v[:, :2]), {"enable_gqa": True}), "agree"),
    "no heads": (lambda q, k, v: ((q[0, 0], k[0, 0], v[0, 0]), {"enable_gqa": True}), "head"),
    "batches": (lambda q, k, v: ((q, k[:, :3], v[:, :3]), {}), "enable_gqa=True"),
    "scale": (lambda q, k, v: ((q, k, v), {"scale": float("nan")}), "finite"),
    "scale shape": (lambda q, k, v: ((q, k, v), {"scale": torch.ones(3)}), "broadcast"),
    "causal bias": (lambda q, k, v: ((q, k, v, causal_lower_right(4, 4)), {}), "lengths"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input_names_the_call(case):
    make, message = BAD[case]
    args, options = make(*(x.detach() for x in qkv()))
    with pytest.raises(cm.InputError, match=message) as raised:
        cm.scaled_dot_product_attention(*args, **options)
    assert "scaled_dot_product_attention(query=" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
