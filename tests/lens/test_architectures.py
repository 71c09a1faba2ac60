"""Twelve architectures: every column against the model's own weights; nothing of it changes."""

from __future__ import annotations

import pandas
import pytest
import torch
from architectures import (
    ARCHITECTURES,
    DECODERS,
    HEADS,
    LAYERS,
    NAMES,
    TEXTS,
    build,
    captured,
    implementations,
    inputs,
    one,
    seen_by,
    use,
)
from dense_lens import KEYS, NUMBERS, assert_tables, dense_table

import cumulant as cm


@pytest.fixture(autouse=True, scope="module")
def _registered():
    cm.lens.register()


CASES = [
    (name, implementation, side)
    for name in NAMES
    for implementation in implementations(name)
    for side in (("right", "left") if name in DECODERS else ("right",))
]


def own_weights(name, given):
    """The weights a model returns, in the order of its attention calls."""
    out = use(build(name), "eager")(**given, output_attentions=True)
    if not ARCHITECTURES[name].two_stacks:
        return out.attentions
    decoder = zip(out.decoder_attentions, out.cross_attentions, strict=True)
    return (*out.encoder_attentions, *(x for pair in decoder for x in pair))


@torch.no_grad()
def expected(name, given):
    """The table by dense algebra from what the unobserved eager model computes."""
    it = ARCHITECTURES[name]
    model = use(build(name), "eager")
    with captured(model) as calls:
        model(**given)
    weights = own_weights(name, given)
    assert len(calls) == len(weights)
    batch, n = weights[0].shape[0], weights[0].shape[-1]
    every = torch.ones(batch, n, dtype=torch.bool)
    text = given["attention_mask"].bool() if "attention_mask" in given else every
    answer = given.get("decoder_attention_mask", text).bool()
    tables = []
    for layer, (call, p) in enumerate(zip(calls, weights, strict=True)):
        m, n = p.shape[-2:]
        in_decoder = it.two_stacks and layer >= 2
        cross = in_decoder and layer % 2 == 1
        real, real_keys = (
            (answer, text) if cross else (answer, answer) if in_decoder else (text, text)
        )
        if in_decoder:
            seen = torch.ones(m, n, dtype=torch.bool)
            seen = seen if cross else seen.tril()
        else:
            seen = seen_by(it, layer, m, n)
        seen = seen & real_keys[:, None, None, :]
        # What the test believes about the mask is what the model does.
        kept = real[:, None, :, None].expand_as(p)
        assert ((p > 0) <= seen)[kept].all()
        tables.append(
            dense_table(
                call.query,
                call.key,
                seen,
                scale=call.scale,
                real=real,
                real_keys=real_keys,
                weights=p,
                bias=call.bias,
                cap=call.cap,
                sinks=call.sinks,
                cross=cross,
                layer=layer,
            )
        )
    return pandas.concat(tables, ignore_index=True)


def observed(name, implementation, given):
    model = use(build(name), implementation)
    with torch.no_grad(), cm.lens.observe(model) as lens:
        model(**given)
    return lens


@pytest.mark.parametrize(("name", "implementation", "side"), CASES)
def test_every_column(name, implementation, side):
    given = inputs(name, side=side)
    table = observed(name, implementation, given).table()
    assert_tables(table, expected(name, given), ARCHITECTURES[name].tolerance)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("implementation", ["eager", "cumulant"])
def test_without_padding(name, implementation):
    """Masks are then often not made at all; long enough for classes III and IV."""
    given = inputs(name, (40,), decoded=(34,))
    table = observed(name, implementation, given).table()
    bare = {k: x for k, x in given.items() if "mask" not in k}
    assert_tables(table, expected(name, given), ARCHITECTURES[name].tolerance)
    without = observed(name, implementation, bare).table()
    pandas.testing.assert_frame_equal(without, table, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------ the model is unchanged


def hidden(name, given, output):
    """The last hidden states at real positions: what a padded one holds is nobody's business."""
    real = given.get("decoder_attention_mask", given.get("attention_mask"))
    states = output.last_hidden_state
    return states if real is None else states[real.bool()]


def run(name, model, given):
    """Outputs and the gradients of all parameters."""
    model.zero_grad()
    states = hidden(name, given, model(**given))
    weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).reshape(states.shape)
    (states * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return states.detach(), gradients


def assert_same(first, second, rtol, atol):
    torch.testing.assert_close(first[0], second[0], rtol=rtol, atol=atol)
    assert first[1].keys() == second[1].keys()
    largest = max(float(x.abs().max()) for x in first[1].values())
    for name, gradient in first[
        1
    ].items():  # some, like that of a key's bias, are zero but for noise
        size = max(float(gradient.abs().max()), 0.01 * largest)
        torch.testing.assert_close(
            second[1][name],
            gradient,
            rtol=rtol,
            atol=atol * size,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(("name", "implementation", "side"), CASES)
def test_observing_changes_neither_outputs_nor_gradients(name, implementation, side):
    model, given = use(build(name), implementation), inputs(name, side=side)
    plain = run(name, model, given)
    with cm.lens.observe(model, energy=True):
        watched = run(name, model, given)
    assert len(plain[1]) > 10
    assert_same(plain, watched, 0.0, 0.0)


@pytest.mark.parametrize(
    ("name", "implementation"), [(n, i) for n in NAMES for i in implementations(n)]
)
def test_dropout_is_unchanged(name, implementation):
    model, given = use(build(name, dropout=0.2), implementation).train(), inputs(name)
    torch.manual_seed(3)
    plain = run(name, model, given)
    again = run(name, model, given)
    torch.manual_seed(3)
    with cm.lens.observe(model) as lens:
        watched = run(name, model, given)
    model.eval()
    assert_same(plain, watched, 0.0, 0.0)
    assert not torch.equal(plain[0], again[0])  # there was dropout
    masses = ["previous_mass", "duplicate_mass", "induction_mass"]  # not for every token
    assert not lens.table().drop(columns=masses, errors="ignore").isna().any().any()


@pytest.mark.parametrize("name", NAMES)
def test_weights_in_the_table_know_no_dropout(name):
    """In training the statistics are those of the weights before dropout, at the first layer."""
    model, given = use(build(name, dropout=0.0), "eager"), inputs(name)
    with cm.lens.observe(model) as lens, torch.no_grad():
        model(**given)
    still = lens.table()
    model.train()
    with cm.lens.observe(model) as lens, torch.no_grad():
        model(**given)
    model.eval()
    pandas.testing.assert_frame_equal(lens.table(), still)


# ------------------------------------------------------------ attn_implementation="cumulant"


SIDES = [(n, s) for n in NAMES for s in (("right", "left") if n in DECODERS else ("right",))]


@pytest.mark.parametrize(("name", "side"), SIDES)
def test_our_implementation_is_eager_attention(name, side):
    """Soft-capping, sink logits, position bias: values and the gradient of every parameter."""
    given = inputs(name, side=side)
    model = build(name, dtype=torch.float32)
    given = {k: x.float() if x.is_floating_point() else x for k, x in given.items()}
    theirs = run(name, use(model, "eager"), given)
    ours = run(name, use(model, "cumulant"), given)
    assert_same(theirs, ours, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("name", "part"),
    [("gptoss", "sinks"), ("t5", "relative_attention_bias.weight"), ("gemma2", "q_proj.weight")],
)
def test_gradients_of_special_parameters_are_there(name, part):
    _, gradients = run(name, use(build(name), "cumulant"), inputs(name))
    mine = [x for label, x in gradients.items() if label.endswith(part)]
    assert mine
    assert all((x != 0).any() for x in mine)


@pytest.mark.parametrize("name", ["bert", "gemma2", "gptoss", "t5"])
def test_second_derivatives_of_our_implementation(name):
    """The gradient of a gradient's norm: the reason to have the implementation."""
    ends = ("query.weight", "q.weight", "q_proj.weight", "sinks", "relative_attention_bias.weight")
    # Unpadded, because eager softmaxes in float32 cannot take the masks of float64 models.
    given = inputs(name, (7,), decoded=(5,))
    results = []
    for implementation in ("eager", "cumulant"):
        model = use(build(name, dtype=torch.float64), implementation)
        chosen = [p for n, p in model.named_parameters() if n.endswith(ends)]
        states = hidden(name, given, model(**given))
        weights = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).reshape(states.shape)
        first = torch.autograd.grad((states * weights).sum(), chosen, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), chosen)
        results.append([*first, *second])
    for theirs, ours in zip(*results, strict=True):
        size = float(theirs.detach().abs().max())
        assert size > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * size)


# -------------------------------------------------------------------------------- numbering


SPECIAL = ("gemma2", "gptoss", "t5")


@pytest.mark.parametrize(
    ("name", "side", "implementation"),
    [
        (name, side, implementation)
        for name, side in SIDES
        for implementation in (("eager", "cumulant") if name in SPECIAL else ("eager",))
        if name != "vit"
    ],
)
def test_padding_changes_no_row(name, side, implementation):
    """A text alone and the same text in a padded batch."""
    given = inputs(name, side=side)
    together = observed(name, implementation, given).table()
    tolerance = max(ARCHITECTURES[name].tolerance, 1e-8)
    for text in range(3):
        alone = observed(name, implementation, one(given, text)).table()
        mine = together[together["input"] == text].reset_index(drop=True)
        assert (alone["input"] == 0).all()
        for column in ("layer", "head", "token", "visible"):
            assert alone[column].tolist() == mine[column].tolist()
        for column in NUMBERS:
            pandas.testing.assert_series_equal(
                alone[column], mine[column], rtol=tolerance, atol=tolerance
            )


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_modules(name):
    it = ARCHITECTURES[name]
    lens = observed(name, "eager", inputs(name))
    table, modules = lens.table(), lens.modules()
    layers = 6 if it.two_stacks else LAYERS
    assert modules["layer"].tolist() == list(range(layers))
    assert sorted(table["layer"].unique()) == list(range(layers))
    assert sorted(table["head"].unique()) == list(range(HEADS))
    kinds = ["self"] * 2 + ["self", "cross"] * 2 if it.two_stacks else ["self"] * LAYERS
    assert modules["attention"].tolist() == kinds
    assert (modules["heads"] == HEADS).all()
    grouped = 2 if name in ("llama", "gemma2", "gptoss") else HEADS
    assert (modules["key_heads"] == grouped).all()
    known = dict(build(name).named_modules())
    assert all(module in known for module in modules["module"])
    assert not table.duplicated(KEYS).any()


def test_a_shared_layer_is_as_many_layers_as_it_runs():
    lens = observed("albert", "eager", inputs("albert"))
    assert lens.modules()["module"].nunique() == 1
    table = lens.table()
    table = table[table["input"] == 0]
    entropy = [table[table["layer"] == layer]["entropy"].to_numpy() for layer in range(LAYERS)]
    assert not (entropy[0] == entropy[1]).any()
    assert not (entropy[1] == entropy[2]).any()


def test_classes_of_long_texts():
    """All four classes occur in a long text with weights this uneven."""
    table = observed("gpt2", "eager", inputs("gpt2", (200,))).table()
    assert set(table["class"]) == {"I", "II", "III", "IV"}


def test_encoder_masks_given_as_four_dimensions():
    """A mask that is no padding mask: keys hidden from every query are padding all the same."""
    given = inputs("bert")
    table = observed("bert", "eager", given).table()
    pad = given["attention_mask"].bool()
    wide = pad[:, None, None, :] & torch.ones(1, 1, pad.shape[1], 1, dtype=torch.bool)
    four = {"input_ids": given["input_ids"], "attention_mask": wide}
    for implementation in ("eager", "sdpa"):
        mask = wide
        if implementation == "eager":
            mask = torch.zeros(wide.shape, dtype=torch.float64).masked_fill(~wide, -1.7e308)
        again = observed("bert", implementation, {**four, "attention_mask": mask}).table()
        pandas.testing.assert_frame_equal(again, table, rtol=1e-9, atol=1e-9)
