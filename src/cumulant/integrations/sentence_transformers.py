"""sentence-transformers: its ranking loss over in-batch negatives, without the matrix of scores.

The loss is called and configured like `MultipleNegativesRankingLoss` and its cached form there, and
returns the same numbers. Each of its directions is one G over another set of keys, and a joint
softmax over directions is the merge of these G: so memory is linear in the batch. Texts are encoded
in mini-batches (GradCache) by `contrastive.encode_in_chunks`. Nothing of the library is imported:
a model is a function from features to ``sentence_embedding``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cumulant.contrastive import encode_in_chunks
from cumulant.core.checks import real, whole
from cumulant.core.errors import InputError
from cumulant.core.precision import wide
from cumulant.distributed import gather
from cumulant.distributed.ranks import Ranks
from cumulant.kernels.merge import Pool
from cumulant.kernels.potential import log_normalizer

__all__ = ["MultipleNegativesRankingLoss"]

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Features = Mapping[str, Any]

_OWNER = "MultipleNegativesRankingLoss"
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# Inner products, by their names here and there.
_COSINE, _DOT = ("cosine", "cos_sim"), ("dot", "dot_score")


class MultipleNegativesRankingLoss(nn.Module):
    """In-batch negatives for sentence-transformers: exact, any batch, memory linear in it.

    It takes the place of ``CachedMultipleNegativesRankingLoss``: same data, (anchor, positive,
    negative_1, ..., negative_n) in columns, same configuration, same values and gradients.
    ``hardness_mode`` is not supported.

    Args:
        model: a ``SentenceTransformer``, or a module from features to ``{"sentence_embedding"}``.
        scale: 1 / temperature.
        similarity_fct: "cosine" or "dot", or the library's ``cos_sim`` or ``dot_score``. Other
            functions are not inner products, and only those have a streamed log-sum-exp.
        mini_batch_size: texts encoded at a time, and once more in the backward pass; None encodes
            a column at once.
        gather_across_devices: anchors meet the candidates of all ranks. The loss stays that of this
            rank's anchors, which DDP averages.
        directions: which pairs count, as in the library.
        partition_mode: "joint", one softmax over all directions, or "per_direction".

    Raises:
        InputError: an option, or columns, that the loss cannot take.

    >>> import torch
    >>> from cumulant.integrations.sentence_transformers import MultipleNegativesRankingLoss
    >>> class Bag(torch.nn.EmbeddingBag):
    ...     def forward(self, features):
    ...         return {"sentence_embedding": super().forward(features["input_ids"])}
    >>> loss = MultipleNegativesRankingLoss(Bag(100, 8))
    >>> columns = [{"input_ids": torch.randint(100, (16, 5))} for _ in range(2)]
    >>> loss(columns).shape
    torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: str | Callable[[Tensor, Tensor], Tensor] = "cosine",
        mini_batch_size: int | None = 32,
        gather_across_devices: bool = False,
        directions: Sequence[Direction] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
    ) -> None:
        super().__init__()
        self.model = model
        self.scale = real(_OWNER, "scale", scale, least=0.0, open_at_least=True)
        self.similarity_fct = _named(similarity_fct)
        if mini_batch_size is not None:
            whole(_OWNER, "mini_batch_size", mini_batch_size, 1)
        self.mini_batch_size = mini_batch_size
        self.gather_across_devices = gather_across_devices
        self.directions = _directions(directions, partition_mode)
        self.partition_mode = partition_mode

    def forward(
        self, sentence_features: Iterable[Features], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of columns of features; labels are not used, as in the library."""
        return self.compute_loss_from_embeddings([self._embed(x) for x in sentence_features])

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor], labels: Tensor | None = None
    ) -> Tensor:
        """The loss of columns of embeddings ``(n, d)``: anchors, positives, negatives."""
        columns = _columns(embeddings)
        if self.similarity_fct in _COSINE:
            columns = [nn.functional.normalize(x, dim=-1) for x in columns]
        queries, *docs = columns
        score = (queries * docs[0]).sum(-1) * self.scale
        own = torch.arange(len(queries), device=queries.device)
        everyone, every_doc = queries, docs
        if self.gather_across_devices and not Ranks().alone:
            everyone, every_doc = gather(queries), [gather(x) for x in docs]
            own = own + Ranks().rank * len(queries)  # as many texts on every rank, as there
        sets = _Sets(queries, docs[0], everyone, torch.cat(every_doc), own, len(docs), self.scale)
        normalizers = [sets.normalizer(direction) for direction in self.directions]
        if self.partition_mode == "joint":
            log_mass = Pool(normalizers).log_normalizer()
        else:
            log_mass = torch.stack(normalizers).mean(0)
        return (log_mass[:, 0] - score).mean().to(embeddings[0].dtype)

    def get_config_dict(self) -> dict[str, Any]:
        """The options, for the model card."""
        return {
            "scale": self.scale,
            "similarity_fct": self.similarity_fct,
            "mini_batch_size": self.mini_batch_size,
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
        }

    def _embed(self, features: Features) -> Tensor:
        tensors = {n: x for n, x in features.items() if isinstance(x, Tensor)}
        others = {n: x for n, x in features.items() if n not in tensors}

        def encode(**part: Tensor) -> Tensor:
            return self.model({**others, **part})["sentence_embedding"]

        if self.mini_batch_size is None:
            return encode(**tensors)
        return encode_in_chunks(encode, tensors, self.mini_batch_size)


class _Sets:
    """The sets of keys that anchors or their positives are compared with."""

    def __init__(
        self,
        queries: Tensor,
        positives: Tensor,
        everyone: Tensor,
        documents: Tensor,
        own: Tensor,
        columns: int,
        scale: float,
    ) -> None:
        self.query, self.positive, self.scale = queries, positives, scale
        self.keys = {"query": everyone, "doc": documents}
        number = torch.arange(len(everyone), device=queries.device)
        self.numbers = {"query": number, "doc": number.repeat(columns)}
        self.own = own

    def normalizer(self, direction: Direction) -> Tensor:
        """G of each anchor, or of each positive, ``(n, 1)``; texts of one kind skip their own."""
        source, _, kind = direction.partition("_to_")
        rows = self.query if source == "query" else self.positive
        arguments = {"query": rows * self.scale, "key": self.keys[kind]}
        if source == kind:
            arguments["query_tag"] = self.own[:, None]
            arguments["key_tag"] = self.numbers[kind][:, None]
        return log_normalizer(arguments)


def _columns(embeddings: Sequence[Tensor]) -> list[Tensor]:
    if len(embeddings) < 2:
        raise InputError(
            f"{_OWNER}: takes columns of anchors and positives, and optionally negatives, but got "
            f"{len(embeddings)}."
        )
    shapes = [tuple(x.shape) for x in embeddings]
    if len(set(shapes)) > 1 or len(shapes[0]) != 2 or not shapes[0][0]:
        raise InputError(
            f"{_OWNER}: every column must have the same number of texts, at least one, and "
            f"embeddings of one size, but have {shapes}."
        )
    return [wide(x) for x in embeddings]


def _named(similarity: Any) -> str:
    name = similarity if isinstance(similarity, str) else getattr(similarity, "__name__", "")
    if name not in (*_COSINE, *_DOT):
        raise InputError(
            f"{_OWNER}: similarity_fct must be cosine or dot (cos_sim or dot_score), because only "
            f"inner products stream, not {similarity!r}."
        )
    return "cos_sim" if name in _COSINE else "dot_score"


def _directions(directions: Sequence[Direction], mode: str) -> tuple[Direction, ...]:
    if mode not in ("joint", "per_direction"):
        raise InputError(f"{_OWNER}: partition_mode must be joint or per_direction, not {mode!r}.")
    given = tuple(directions)
    if "query_to_doc" not in given or not set(given) <= set(_DIRECTIONS):
        raise InputError(
            f"{_OWNER}: directions must contain query_to_doc and may contain query_to_query, "
            f"doc_to_query, doc_to_doc, but are {given!r}."
        )
    if mode == "per_direction" and set(given) & {"query_to_query", "doc_to_doc"}:
        raise InputError(
            f"{_OWNER}: query_to_query and doc_to_doc have no positive of their own, so they need "
            'partition_mode="joint".'
        )
    return given
