"""Three associative memories recall handwritten digits from corrupted or half-hidden copies.

They store 3 or 40 of scikit-learn's digits, 8 x 8 pixels of -1 and 1. A digit counts as recalled if
the retrieved signs differ from it in at most two pixels. For comparison: how often the stored digit
most like the query is the right one. Digits look alike, so the matrix of the classical Hopfield
network and of linear attention holds mostly what they share; the dense memory (attention) separates
them.
Run it: python examples/digits_memory.py [picture.png] (needs scikit-learn, and matplotlib to draw)
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor

import cumulant as cm

BETA = 1.0
TRIALS = {3: 100, 40: 20}  # how many digits are stored: how often other ones are chosen
SHARES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
NAMES = ["classical", "linear", "dense"]


def digits() -> Tensor:
    """All digits that differ, ``(n, 64)`` of -1 and 1."""
    x = torch.from_numpy(load_digits().data).float()
    return torch.where(x >= 8, 1.0, -1.0).unique(dim=0)


def flipped(x: Tensor, share: float) -> Tensor:
    """Each pattern with this share of its pixels flipped."""
    place = torch.rand(x.shape).argsort(-1)
    return torch.where(place < round(share * x.shape[-1]), -x, x)


def hidden(x: Tensor) -> Tensor:
    """Each pattern with its lower half unknown."""
    return torch.cat([x[:, :32], torch.zeros_like(x[:, 32:])], -1)


def retrieved(x: Tensor, query: Tensor) -> dict[str, Tensor]:
    """What each memory of the patterns gives back, and the pattern most like the query."""
    return {
        "classical": cm.memory.ClassicalMemory(x).retrieve(query, steps=30).state,
        "linear": cm.memory.LinearMemory(x).retrieve(query, steps=1).state,  # more steps blend more
        "dense": cm.Memory(x, BETA).retrieve(query, tol=1e-3).state,
        "nearest": x[(query @ x.T).argmax(-1)],
    }


def rates(x: Tensor, query: Tensor) -> Tensor:
    """Share of patterns recalled, ``(4,)``."""
    wrong = [(state.sign() != x).sum(-1) for state in retrieved(x, query).values()]
    return (torch.stack(wrong) <= 2).double().mean(-1)


def table(every: Tensor, size: int, trials: int) -> Tensor:
    """Mean recall ``(shares + 1, 4)`` over random choices of digits; the last row: half hidden."""
    rows = list[Tensor]()
    for _ in range(trials):
        x = every[torch.randperm(len(every))[:size]]
        queries = [flipped(x, share) for share in SHARES] + [hidden(x)]
        rows.append(torch.stack([rates(x, query) for query in queries]))
    return torch.stack(rows).mean(0)


def draw(x: Tensor, recall: dict[int, Tensor], path: str) -> None:
    """Digits and what became of them; recall against corruption."""
    from cumulant.figures import COLORS, MUTED, new_figure, style, tidy, write

    count = 4
    shown = torch.cat([x[:count], x[:count]])
    query = torch.cat([flipped(x[:count], 0.2), hidden(x[:count])])
    back = retrieved(x, query)
    rows = {"stored": shown, "asked": query, **{name: back[name] for name in NAMES}}
    with style():
        figure = new_figure(8.4, 7.4)
        top, bottom = figure.subfigures(2, 1, height_ratios=[1.35, 1])
        rate = dict(zip(NAMES, recall[len(x)][SHARES.index(0.2)].tolist(), strict=False))
        others = max(rate["classical"], rate["linear"])
        title = (
            f"{len(x)} digits stored, 20 % of pixels flipped: the dense memory recalls "
            f"{100 * rate['dense']:.0f} %, the others at most {100 * others:.1f} %"
        )
        top.suptitle(title, fontsize=10.5, x=0.01, ha="left")
        told = ["20 % of pixels flipped", "lower half hidden"]
        for part, first, text in zip(top.subfigures(1, 2), (0, count), told, strict=True):
            grid = part.subplots(len(rows), count, gridspec_kw={"wspace": 0.08, "hspace": 0.08})
            for line, (name, states) in zip(grid, rows.items(), strict=True):
                for axes, state, right in zip(
                    line, states[first : first + count], shown[first : first + count], strict=True
                ):
                    tidy(axes)
                    axes.set(xticks=[], yticks=[])
                    axes.spines[:].set(visible=True, linewidth=0.5)
                    if name in NAMES and int((state.sign() != right).sum()) > 2:
                        axes.spines[:].set(linewidth=1.6, edgecolor=COLORS[1])
                    size = float(state.abs().max())
                    axes.imshow(-state.view(8, 8), cmap="gray", vmin=-size, vmax=size)
                if first == 0:
                    line[0].set_ylabel(name, rotation=0, ha="right", va="center")
            part.supxlabel(text, fontsize=9.5)
        pair = bottom.subplots(1, 2, sharey=True)
        for axes, (size, found) in zip(pair, recall.items(), strict=True):
            names = [*NAMES, "nearest stored digit"]
            for i, (name, dash) in enumerate(zip(names, ("-", "--", "-", ":"), strict=True)):
                look = {"color": (*COLORS, MUTED)[(1, 4, 0, -1)[i]], "linestyle": dash}
                at = [100 * s for s in SHARES]
                mark = {} if dash == ":" else {"marker": "o", "ms": 4}
                axes.plot(at, 100 * found[:-1, i], label=name, **mark, **look)
            axes.set(title=f"{size} digits stored", xlabel="pixels flipped, %", ylim=(-4, 104))
        pair[0].set_ylabel("recalled, %")
        pair[1].legend(loc="upper right")
        means = ", ".join(f"{trials} of {size}" for size, trials in TRIALS.items())
        told = f"recalled: at most 2 of 64 pixels wrong (others framed in red); means over {means}"
        bottom.supxlabel(told, fontsize=8.5, color=MUTED)
    write(figure, path)


def main() -> None:
    torch.manual_seed(0)
    every = digits()
    recall = {size: table(every, size, trials) for size, trials in TRIALS.items()}
    for size, found in recall.items():
        print(f"{size} digits stored; recalled, % (mean over {TRIALS[size]} choices)")
        print("pixels flipped  " + "".join(f"{name:>11}" for name in [*NAMES, "nearest"]))
        names = [f"{share:.0%}" for share in SHARES] + ["half hidden"]
        for name, row in zip(names, found.tolist(), strict=True):
            print(f"{name:>14}  " + "".join(f"{100 * value:>11.1f}" for value in row))
    if len(sys.argv) > 1:
        x = every[torch.randperm(len(every))[:40]]
        draw(x, recall, sys.argv[1])
        print(f"wrote {sys.argv[1]}")


if __name__ == "__main__":
    main()
