"""What the application says of a text, against the lens, eager attention and finite differences."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import cumulant as cm
from cumulant.serve.changes import Change, Edits
from cumulant.serve.models import Models
from cumulant.serve.running import Cancelled, run_model
from web_server import serving

TEXT = "The cat sat on the mat because it was tired."


@pytest.fixture(scope="module")
def minilm():
    return cm.lens.load()


@pytest.fixture(scope="module")
def client(minilm):
    with serving(Models([minilm])) as client:
        yield client


def eager(minilm, text):
    model = minilm.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(**minilm.tokenizer(text, return_tensors="pt"), output_attentions=True)
        return torch.stack([x[0] for x in out.attentions]).double()
    finally:
        model.set_attn_implementation(before)


def test_statistics_are_those_of_eager_attention(client, minilm):
    status, found = client.ask("view", model=0, text=TEXT)
    assert status == 200
    p = eager(minilm, TEXT)  # (L, H, N, N)
    numbers = {name: torch.tensor(x).double() for name, x in found["statistics"].items()}
    entropy = -(p * p.clamp_min(1e-30).log()).sum(-1)
    torch.testing.assert_close(numbers["entropy"], entropy, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(numbers["effective_keys"], entropy.exp(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(numbers["received"], p.sum(-2), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(numbers["sink_mass"], p[..., 0], rtol=1e-3, atol=1e-5)
    best = numbers["score_max"] - numbers["log_normalizer"]
    torch.testing.assert_close(best.exp(), p.max(-1).values, rtol=2e-3, atol=1e-4)


def test_one_head_is_the_tilted_measure_in_a_plane(client, minilm):
    _, found = client.ask("head", model=0, text=TEXT, layer=2, head=3, token=4)
    p = eager(minilm, TEXT)[2, 3]
    np.testing.assert_allclose(found["weights"], p, atol=2e-5)
    keys, w = np.array(found["keys"]), p[4].numpy()
    mean = w @ keys
    np.testing.assert_allclose(found["mean"], mean, atol=1e-3)
    spread = (keys - mean).T @ np.diag(w) @ (keys - mean)
    np.testing.assert_allclose(found["covariance"], spread, atol=1e-3)


def test_two_hundred_requests_of_eight_clients_give_the_numbers_of_observe(client, minilm):
    texts = [f"Text number {i} is about attention." for i in range(5)]
    with cm.lens.observe(minilm.model, spectrum=False) as lens:
        for text in texts:
            minilm.model(**minilm.tokenizer(text, return_tensors="pt"))
    table = lens.table()

    def ask(i):
        status, found = client.ask("view", model=0, text=texts[i % 5])
        return status, np.array(found["statistics"]["entropy"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(200)))
    assert {status for status, _ in answers} == {200}
    for i in range(5):
        want = table[table["input"] == i]["entropy"].to_numpy()
        for _, got in answers[i::5]:
            np.testing.assert_allclose(got.ravel(), want, rtol=1e-4, atol=1e-5)


class TestChanges:
    def changed(self, client, *changes, **more):
        status, found = client.ask("view", model=0, text=TEXT, changes=list(changes), **more)
        assert status == 200, found
        return {name: np.array(x) for name, x in found["statistics"].items()}, found

    def test_temperature_scales_the_scores_of_one_head(self, client):
        where = {"layer": 1, "head": 2}
        hot, _ = self.changed(client, {"kind": "temperature", "value": 1e2, **where})
        n = hot["entropy"].shape[-1]
        np.testing.assert_allclose(hot["entropy"][1, 2], np.log(n), atol=5e-3)
        plain, _ = self.changed(client)
        np.testing.assert_array_equal(hot["entropy"][1, 3], plain["entropy"][1, 3])
        np.testing.assert_array_equal(hot["entropy"][0], plain["entropy"][0])
        assert (hot["entropy"][2] != plain["entropy"][2]).any()  # later layers feel it

    def test_uniform_and_no_sink(self, client):
        uniform, _ = self.changed(client, {"kind": "uniform", "layer": 0, "head": 0})
        np.testing.assert_allclose(uniform["received"][0, 0], 1.0, rtol=1e-4)
        hidden, _ = self.changed(client, {"kind": "no_sink", "layer": 0, "head": 0})
        assert (hidden["sink_mass"][0, 0] == 0).all()
        assert (hidden["received"][0, 0][0] == 0).all()

    def test_a_swap_is_the_text_with_the_other_word(self, client):
        _, swapped = self.changed(client, swaps=[[2, "dog"]])
        status, written = client.ask("view", model=0, text=TEXT.replace("cat", "dog"))
        assert status == 200
        assert swapped == written

    def test_every_layer_left_out_is_the_embedding(self, client, minilm):
        _, found = self.changed(client, *({"kind": "skip", "layer": i} for i in range(1, 6)))
        first = np.array(found["statistics"]["entropy"])[0]
        plain, _ = self.changed(client)
        np.testing.assert_array_equal(first, plain["entropy"][0])


def test_a_gaussian_head_is_the_regression_on_its_visible_keys(minilm):
    ids = minilm.tokenizer(TEXT, return_tensors="pt")
    seen = run_model(minilm.model, ids).at(3)
    call, head = seen.call, 5
    k, v = call.key[0, head].double().numpy(), call.value[0, head].double().numpy()
    q = call.query[0, head].double().numpy() * call.scale
    joint = np.cov(np.hstack([k, v]).T, bias=True)
    d = k.shape[1]
    want = v.mean(0) + q @ joint[:d, d:]
    answered = Edits([Change("gaussian", 3, head)]).answer(3, call)
    np.testing.assert_allclose(answered[0, head], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answered[:, :head], call.attend().mean[:, :head])


def test_the_tangent_is_the_limit_of_true_changes(client):
    _, found = client.ask("tangent", model=0, text=TEXT, token=2, toward="dog")
    missed = np.array(found["missed"])
    steps = np.array(found["steps"])
    # A first-order error falls linearly with the step.
    assert missed[0] < 0.15
    np.testing.assert_allclose(missed[0] / missed[1], steps[0] / steps[1], rtol=0.1)


def test_depth_has_every_sublayer_of_every_layer(client):
    _, found = client.ask("depth", model=0, text=TEXT)
    rows = {(x["layer"], x["sublayer"]) for x in found["expansions"]}
    kinds = ("attention", "feed_forward", "norm", "block")
    assert rows == {(i, kind) for i in range(6) for kind in kinds}


def test_a_stopped_run_computes_no_further_layer(minilm):
    ids = minilm.tokenizer(TEXT, return_tensors="pt")
    stop, layers = threading.Event(), []
    hook = minilm.model.encoder.layer[2].register_forward_hook(lambda *_: stop.set())
    last = minilm.model.encoder.layer[4].register_forward_hook(lambda *_: layers.append(4))
    try:
        with pytest.raises(Cancelled):
            run_model(minilm.model, ids, stop)
    finally:
        hook.remove(), last.remove()
    assert layers == []
    assert len(run_model(minilm.model, ids).seen) == 6
