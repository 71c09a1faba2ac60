"""Every column of every table: its meaning, unit and formula.

The documentation, the file metadata and the report all use these definitions.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLUMNS", "TABLES", "Column"]


class Column(NamedTuple):
    """Name, unit, definition and the theorem behind a column."""

    name: str
    unit: str
    definition: str
    theory: str = ""


_ALL = (
    Column("input", "index", "index of the text, counted over all forward calls"),
    Column("layer", "index", "attention calls, numbered in order of first execution"),
    Column("head", "index", "query head"),
    Column("token", "index", "position of the query in its text, not counting padding"),
    Column("token_text", "", "the token as text, with a leading space where a word begins"),
    Column("top_key_text", "", "the top key as text; <sink> for the sink logit"),
    Column("attention", "", "self, or cross if the keys come from another sequence", "T20"),
    Column("module", "", "name of the module in the model"),
    Column("log_normalizer", "nats", "G_i = log sum_j exp(score_ij + bias_ij)", "T12"),
    Column("entropy", "nats", "H_i = -sum_j p_ij log p_ij = G_i - E_i[score + bias]", "T7"),
    Column("effective_keys", "keys", "exp(H_i)", "T7"),
    Column("k90", "keys", "smallest number of keys whose weights sum to at least 0.90", "T21"),
    Column(
        "class",
        "",
        "by k90 / visible: I above 1/2, II above 1/8, III above 1/32, otherwise IV; for a head, "
        "by the median over its tokens",
        "T21",
    ),
    Column("visible", "keys", "number of keys the query may attend to, including a sink logit"),
    Column(
        "score_variance", "nats^2", "Var_i[scale <q_i, k>], without the bias: heat capacity", "T7"
    ),
    Column(
        "top_key", "index", "token of the key with the largest weight; -1 for the sink logit", "T12"
    ),
    Column("top_weight", "probability", "max_j p_ij", "T12"),
    Column("self_mass", "probability", "p_ii; 0 in cross-attention", "T12"),
    Column(
        "received",
        "fraction",
        "share of all weight that token j receives: mean over queries i of p_ij; of images",
        "T12",
    ),
    Column(
        "sink_mass",
        "probability",
        "weight on the first token, plus the weight on a sink logit if there is one",
        "T12",
    ),
    Column("sink_logit_mass", "probability", "weight on the sink logit", "T12"),
    Column(
        "previous_mass",
        "probability",
        "weight on the token before; null for the first token; for a head, the mean over the rest",
        "T12",
    ),
    Column(
        "duplicate_mass",
        "probability",
        "weight on earlier occurrences of the same token (the nearest 32); null where there is "
        "none; for a head, the mean over the tokens that have one",
        "T12",
    ),
    Column(
        "induction_mass",
        "probability",
        "weight on the tokens that followed earlier occurrences of the same token (the nearest "
        "32); null where there is none; for a head, the mean over the tokens that have one",
        "T12",
    ),
    Column("distance", "tokens", "where distance_mass is: query minus key position", "T12"),
    Column(
        "distance_mass",
        "probability",
        "largest mean weight on one fixed distance, from 1 to 8 tokens back or ahead; distances "
        "that fewer than 8 tokens have do not count, and without any it is null",
        "T12",
    ),
    Column(
        "repeat_induction",
        "probability",
        "induction_mass on the standard test: 50 random tokens, then the same 50 again",
        "T12",
    ),
    Column("repeat_duplicate", "probability", "duplicate_mass on the same test", "T12"),
    Column("repeat_previous", "probability", "previous_mass on the same test", "T12"),
    Column("fisher_trace", "key units^2", "tr Cov_i[k]", "T1"),
    Column("leading_eigenvalue", "key units^2", "largest eigenvalue of Cov_i[k]", "T14"),
    Column("k90_fraction", "fraction", "median over tokens of k90 / visible", "T21"),
    Column(
        "lipschitz",
        "ratio",
        "scale * max_i lambda_max(Cov_i[k]): the largest local stretch of q -> E[k] at the "
        "observed queries; null for soft-capped scores",
        "T14",
    ),
    Column(
        "energy_change",
        "key units^2",
        "mean over tokens of E(E_i[k]) - E(q_i), E(x) = -G(scale x) / scale + |x|^2 / 2",
        "T19",
    ),
    Column("energy_rises", "fraction", "share of tokens whose energy rose beyond rounding", "T19"),
    Column(
        "symmetry",
        "[-1, 1]",
        "tr(AA) / tr(AA') of A = W_q W_k': 1 symmetric, -1 antisymmetric",
        "T14",
    ),
    Column(
        "definiteness",
        "[-1, 1]",
        "sum of the eigenvalues of A's symmetric part over the sum of their absolute values: 1 is "
        "positive semidefinite",
        "T14",
    ),
    Column(
        "whitened_symmetry",
        "[-1, 1]",
        "tr(SS) / tr(SS') of S = C^(1/2) A C^(1/2), C the covariance of the states that the "
        "attention module is given, sinks left out: 1 for the link of a Gaussian",
        "T35",
    ),
    Column(
        "whitened_definiteness",
        "[-1, 1]",
        "the definiteness of S: 1 for the link of a Gaussian",
        "T35",
    ),
    Column(
        "value_alignment",
        "[-1, 1]",
        "Frobenius cosine of the value map W_v W_o with the score matrix",
        "T14",
    ),
    Column(
        "link_linear",
        "R^2",
        "cross-validated fit of the best affine map from attention outputs to their true link",
        "T29",
    ),
    Column(
        "link_trained",
        "R^2",
        "fit of the trained map, scale sum_j p_ij q_j, to the link of E_i[k]",
        "T29",
    ),
    Column("link_exists", "fraction", "share of outputs whose link was found", "T29"),
    Column(
        "attention_expansion",
        "ratio",
        "median over token pairs of |f(x) - f(y)| / |x - y| for f = attention with its residual",
        "T14",
    ),
    Column("cross_attention_expansion", "ratio", "the same for cross-attention", "T14"),
    Column("feed_forward_expansion", "ratio", "the same for the feed-forward sublayer", "T23"),
    Column("norm_contraction", "ratio", "the same for the block's normalizations", "T15"),
    Column(
        "participation_ratio",
        "dimensions",
        "(sum l)^2 / sum l^2 over the eigenvalues l of the covariance of the hidden states, over "
        "all texts",
        "T17",
    ),
    Column(
        "anisotropy",
        "cosine",
        "mean cosine over pairs of hidden states, within and across texts",
        "T17",
    ),
    Column(
        "rank_residual",
        "fraction",
        "|X - 1 mean'| / |X| (Frobenius) of the hidden states X of one text, averaged over texts",
    ),
    Column(
        "gaussianity",
        "",
        "energy distance of the standardized hidden states from a Gaussian, in leading directions",
        "T17",
    ),
    Column("gaussianity_null", "", "95 % quantile of that distance for Gaussian points", "T17"),
    Column("gaussianity_p", "probability", "p-value of the test for a Gaussian", "T17"),
    Column(
        "sensitivity_qk",
        "ratio",
        "relative change of the output for a small random relative change of W_q and W_k",
        "T23",
    ),
    Column("sensitivity_vo", "ratio", "the same for W_v and W_o", "T23"),
    Column("sublayer", "", "attention, cross_attention, feed_forward, norm, or block (the whole)"),
    Column("name", "", "name of the normalization module"),
    Column(
        "tokens",
        "",
        "in expansions: all, or without_sinks (excluding tokens that are the top key of more than "
        "0.3 of a layer's queries); in inputs: number of tokens",
    ),
    Column("pairs", "count", "number of token pairs, both of one text"),
    Column("q05", "ratio", "5 % quantile over the pairs"),
    Column("q25", "ratio", "25 % quantile over the pairs"),
    Column("median", "ratio", "median over the pairs"),
    Column("q75", "ratio", "75 % quantile over the pairs"),
    Column("q95", "ratio", "95 % quantile over the pairs"),
    Column(
        "radius",
        "",
        "length of c, as the standard deviation of <v_w, c> over words",
        "T31",
    ),
    Column("norm", "embedding units", "length of c", "T31"),
    Column("centered", "", "whether the mean embedding was subtracted first", "T31"),
    Column("directions", "", "how the directions of c were drawn", "T31"),
    Column("mean", "nats", "mean of log Z over directions, log Z = log sum_w exp <v_w, c>", "T31"),
    Column("sd", "nats", "standard deviation of log Z over directions", "T31"),
    Column("q025", "nats", "2.5 % quantile of log Z over directions", "T31"),
    Column("q975", "nats", "97.5 % quantile of log Z over directions", "T31"),
    Column("relative_sd", "ratio", "standard deviation of Z over its mean", "T31"),
    Column(
        "frequency_correlation",
        "correlation",
        "correlation of log frequency and |v_w|^2, if frequencies were given",
        "T31",
    ),
    Column("text", "", "name of the text"),
    Column("rank", "", "1 for the largest weight of the query, up to 5"),
    Column("key", "token number", "number of the key with that weight; -1 for the sink logit"),
    Column("key_text", "", "that key as text; <sink> for the sink logit"),
    Column("weight", "probability", "the weight, to five decimals"),
)

COLUMNS = {column.name: column for column in _ALL}

TABLES = {
    "tokens": "one row per (input, layer, head, token)",
    "heads": "one row per (layer, head): means over all tokens, and statistics of the weights",
    "layers": "one row per transformer block",
    "expansions": "quantiles of |f(x) - f(y)| / |x - y| over pairs of tokens, per sublayer",
    "inputs": "one row per input: its text and its length",
    "top": "one row per (input, layer, head, token, rank): the five largest weights of each query "
    "in the texts shown",
    "partition": "log Z(c) = log sum_w exp <v_w, c> of the input embeddings, c random by length",
}
