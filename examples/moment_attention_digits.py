"""Noisy digits through a network trained on clean ones: what the carried covariance is worth.

A picture of scikit-learn's digits is a sequence of 8 rows; a class token attends to them and is
read by a linear map. The network is trained on nearly clean pictures. Then some rows of each test
picture get strong noise of known variance. Seven ways to proceed are compared:

    means        the network sees the noisy rows and nothing else
    temperature  the same, its logits divided by a number fitted on validation pictures as noisy
    covariances  the same weights in cm.nn.MomentAttention, given the variance of every row, and
                 softmax averaged over the Gaussian logits
    sampled      the same weights, 32 passes with rows drawn around those seen
    shrunk       the same weights, rows first drawn to their prior mean as the noise demands (a
                 Gaussian prior of every row, from the training pictures)
    shrunk, cov. both: mean and covariance of every row given what is seen of it
    retrained    another network, trained on noisy pictures and given the noise of every row

Results: without a prior, carrying the covariance leaves the answers unchanged and improves their
calibration, most where the noise is strong (where 32 passes improve it more). With the prior,
shrinking improves the answers too; the covariance then adds little, and hurts at weak noise (rows
count as independent given what is seen, which they are not). A network trained on this noise has
the best answers and likelihood, as long as the noise is like that in training.

Form and reading of the covariances are chosen on the validation part; the test part only gives the
results. Run it: python examples/moment_attention_digits.py [picture.png] (needs scikit-learn, and
matplotlib to draw; less than a minute on one core)
"""

import math
import sys
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import cumulant as cm

SIZE, HEADS, EPOCHS, BATCH, RATE, DECAY = 16, 2, 40, 250, 2e-2, 1e-2
SEEDS, REPEATS, DRAWS = 5, 2, 32
QUIET, TRAINED_ON, LEVELS = 0.1, 0.5, [0.25, 0.5, 1.0]  # standard deviations; pixels are in [0, 1]
TRAINING, VALIDATION, TEST = slice(0, 1000), slice(1000, 1300), slice(1300, None)
WAYS = [
    *("means", "temperature", "covariances", "sampled"),
    *("shrunk", "shrunk, cov.", "retrained"),
]
METRICS = ["right, %", "neg. log-likelihood", "calibration error, %", "right of surest 80 %, %"]


def noisy(x: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Pictures with noise in some rows, more in some pictures than in others, and its deviation."""
    share = 0.8 * torch.rand(len(x), 1, 1)
    loud = level * (0.5 + torch.rand(len(x), 8, 1))
    deviation = torch.where(torch.rand(len(x), 8, 1) < share, loud, QUIET)
    return x + deviation * torch.randn(x.shape), deviation


def around(seen: Tensor, deviation: Tensor) -> cm.nn.TokenMoments:
    """Rows without a prior: what is seen, and the covariance of its noise."""
    return cm.nn.TokenMoments(seen, deviation.square()[..., None] * torch.eye(8))


class Prior:
    """A Gaussian for every row, from training pictures."""

    def __init__(self, x: Tensor) -> None:
        self.mean = x.mean(0)
        apart = (x - self.mean).transpose(0, 1)
        self.values, self.axes = torch.linalg.eigh(apart.mT @ apart / len(x))
        self.values = self.values.clamp_min(1e-4)

    def given(self, seen: Tensor, deviation: Tensor) -> cm.nn.TokenMoments:
        """Mean and covariance of the rows given what is seen of them."""
        share = self.values / (self.values + deviation.square())
        along = ((seen - self.mean)[..., None, :] @ self.axes)[..., 0, :] * share
        mean = self.mean + (self.axes @ along[..., None])[..., 0]
        scaled = self.axes * (share * deviation.square())[..., None, :]
        return cm.nn.TokenMoments(mean, scaled @ self.axes.mT)


class Network(nn.Module):
    """Rows and a class token, one attention layer with its residual, logits."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        self.embed = nn.Parameter(0.35 * torch.randn(8, 8 + more, SIZE))  # each row has its own map
        self.place = nn.Parameter(0.5 * torch.randn(9, SIZE))
        self.attention = nn.MultiheadAttention(SIZE, HEADS, batch_first=True)
        self.out = nn.Linear(SIZE, 10)

    def tokens(self, rows: Tensor) -> Tensor:
        embedded = torch.einsum("bnf,nfe->bne", rows, self.embed)
        return F.pad(embedded, (0, 0, 1, 0)) + self.place

    def forward(self, rows: Tensor) -> Tensor:
        x = self.tokens(rows)
        read, _ = self.attention(x[:, :1], x, x, need_weights=False)
        return self.out((x[:, :1] + read)[:, 0])


def average(mean: Tensor, covariance: Tensor) -> Tensor:
    """Log of the softmax averaged over Gaussian logits."""
    root = torch.linalg.cholesky(covariance + 1e-4 * torch.eye(10))
    logits = mean + (root @ torch.randn(DRAWS, len(mean), 10, 1))[..., 0]
    return logits.log_softmax(-1).logsumexp(0) - math.log(DRAWS)


def carried(network: Network, rows: cm.nn.TokenMoments, form: str, reading: str) -> Tensor:
    """Log-probabilities with the covariance taken through every map of the network."""
    layer = cm.nn.MomentAttention.from_attention(
        network.attention, covariance=form, reading=reading
    )
    covariance = F.pad(network.embed.mT @ rows.covariance @ network.embed, (0, 0, 0, 0, 1, 0))
    if form == "diagonal":
        covariance = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0.0)
    mean, spread = layer(network.tokens(rows.mean), covariance, residual=True)
    spread = torch.diag_embed(spread[:, 0]) if form == "diagonal" else spread[:, 0]
    weight = network.out.weight
    return average(network.out(mean[:, 0]), weight @ spread @ weight.mT)


def sampled(network: Network, rows: cm.nn.TokenMoments) -> Tensor:
    """Log-probabilities averaged over rows drawn from their Gaussians."""
    root = torch.linalg.cholesky(rows.covariance + 1e-6 * torch.eye(8))
    found = [
        network(rows.mean + (root @ torch.randn(*rows.mean.shape, 1))[..., 0]).log_softmax(-1)
        for _ in range(DRAWS)
    ]
    return torch.stack(found).logsumexp(0) - math.log(DRAWS)


def train(network: Network, rows: Callable[[Tensor], Tensor], x: Tensor, label: Tensor) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)
    total = EPOCHS * math.ceil(len(x) / BATCH)
    slower = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(x)).split(BATCH):
            loss = F.cross_entropy(network(rows(x[chosen])), label[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            slower.step()


def told(seen: Tensor, deviation: Tensor) -> Tensor:
    """The rows, and the noise beside them."""
    return torch.cat([seen, deviation.log()], -1)


def trained(x: Tensor, label: Tensor) -> tuple[Network, Network]:
    """A network that saw nearly clean pictures, and one that saw noise and was told of it."""
    clean, aware = Network(), Network(1)
    train(clean, lambda x: x + QUIET * torch.randn(x.shape), x, label)
    train(aware, lambda x: told(*noisy(x, TRAINED_ON)), x, label)
    return clean, aware


def temperature(logits: Tensor, label: Tensor) -> float:
    """The divisor of the logits under which the labels are likeliest."""
    tried = torch.linspace(0.5, 6.0, 111)
    losses = torch.stack([F.cross_entropy(logits / t, label) for t in tried])
    return float(tried[losses.argmin()])


def metrics(found: Tensor, label: Tensor) -> list[float]:
    """What `METRICS` names, from log-probabilities."""
    surest, guess = found.exp().max(-1)
    right = (guess == label).double()
    bins = (surest * 15).long().clamp_max(14)
    gaps = torch.zeros(15, dtype=torch.double).index_add_(0, bins, right - surest)
    kept = surest.argsort(descending=True)[: round(0.8 * len(label))]
    calibration = float(gaps.abs().sum() / len(label))
    loss = float(F.nll_loss(found, label))
    return [100 * float(right.mean()), loss, 100 * calibration, 100 * float(right[kept].mean())]


def risks(found: Tensor, label: Tensor) -> Tensor:
    """Percent wrong among the surest, for 10 % to 100 % of the pictures kept."""
    surest, guess = found.exp().max(-1)
    wrong = (guess != label).double()[surest.argsort(descending=True)]
    at = [round(share * len(label) / 100) for share in range(10, 101, 5)]
    return torch.stack([100 * wrong[:n].mean() for n in at])


def chosen(network: Network, x: Tensor, label: Tensor) -> tuple[str, str]:
    """Form and reading under which the validation labels are likeliest, at the middle level."""
    rows = around(*noisy(x, TRAINED_ON))
    tried = [(form, way) for form in ("dense", "diagonal") for way in ("average", "mixture")]
    losses = {pair: float(F.nll_loss(carried(network, rows, *pair), label)) for pair in tried}
    listed = ", ".join(f"{form} {way} {loss:.2f}" for (form, way), loss in losses.items())
    print(f"neg. log-likelihood on validation pictures: {listed}")
    return min(losses, key=lambda pair: losses[pair])


@torch.no_grad()
def tested(
    prior: Prior, networks: tuple[Network, Network], x: Tensor, label: Tensor, pair: tuple[str, str]
) -> tuple[Tensor, Tensor]:
    """Metrics ``(levels, ways, metrics)``, and risks ``(ways, shares kept)`` at the last level."""
    clean, aware = networks
    rows, curves = list[list[list[float]]](), list[Tensor]()
    for level in LEVELS:
        fitted = torch.cat([x[VALIDATION]] * REPEATS)
        divisor = temperature(clean(noisy(fitted, level)[0]), label[VALIDATION].repeat(REPEATS))
        seen, deviation = noisy(torch.cat([x[TEST]] * REPEATS), level)
        truth, plain = label[TEST].repeat(REPEATS), around(seen, deviation)
        given = prior.given(seen, deviation)
        found = [
            clean(seen).log_softmax(-1),
            (clean(seen) / divisor).log_softmax(-1),
            carried(clean, plain, *pair),
            sampled(clean, plain),
            clean(given.mean).log_softmax(-1),
            carried(clean, given, *pair),
            aware(told(seen, deviation)).log_softmax(-1),
        ]
        rows.append([metrics(way, truth) for way in found])
        curves = [risks(way, truth) for way in found]
    return torch.tensor(rows), torch.stack(curves)


def draw(found: Tensor, curves: Tensor, path: str) -> None:
    """Likelihood and calibration against noise, and errors among the surest."""
    from cumulant.figures import COLORS, MUTED, new_figure, style, write

    looks = [
        *((MUTED, "-"), (COLORS[4], "--"), (COLORS[0], "-"), (COLORS[5], ":")),
        *((COLORS[2], "--"), (COLORS[2], "-"), (COLORS[1], "-.")),
    ]
    with style():
        figure = new_figure(9.6, 3.9)
        axes = figure.subplots(1, 3)
        mean, deviation = found.mean(0), found.std(0)
        for i, (way, (color, dash)) in enumerate(zip(WAYS, looks, strict=True)):
            look = {"color": color, "linestyle": dash, "label": way}
            for place, metric in ((0, 1), (1, 2)):
                axes[place].errorbar(
                    [level * (1 + 0.02 * (i - 3)) for level in LEVELS],
                    mean[:, i, metric],
                    deviation[:, i, metric],
                    **look,
                    marker="o",
                    ms=3.5,
                    elinewidth=1,
                )
            axes[2].plot(range(10, 101, 5), curves.mean(0)[i], **look)
        for place, name in enumerate(["negative log-likelihood", "calibration error, %"]):
            axes[place].set(title=name, xlabel="standard deviation of the noise", xscale="log")
            axes[place].set_xticks(LEVELS, [f"{level:g}" for level in LEVELS])
            axes[place].minorticks_off()
        axes[0].set(yscale="log")
        axes[0].set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
        axes[1].set_ylim(bottom=0)
        axes[2].set(title=f"wrong among the surest, %, noise {LEVELS[-1]:g}", ylim=(0, None))
        axes[2].set_xlabel("pictures kept, %")
        handles, labels = axes[2].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(WAYS))
    write(figure, path)


def main() -> None:
    torch.manual_seed(0)
    data = load_digits()
    order = torch.randperm(len(data.target))
    x = torch.from_numpy(data.images).float()[order] / 16
    label = torch.from_numpy(data.target)[order]
    prior = Prior(x[TRAINING])
    pair, every, curves = ("", ""), list[Tensor](), list[Tensor]()
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        networks = trained(x[TRAINING], label[TRAINING])
        if not seed:
            with torch.no_grad():
                pair = chosen(networks[0], x[VALIDATION], label[VALIDATION])
            print(f"covariances are carried in the {pair[0]} form, read as {pair[1]}")
        one, risk = tested(prior, networks, x, label, pair)
        every.append(one)
        curves.append(risk)
    found = torch.stack(every)
    mean, deviation = found.mean(0), found.std(0)
    count = len(label[TEST])
    print(f"{count} test digits, {REPEATS} times with noise; mean and deviation over {SEEDS} seeds")
    for i, level in enumerate(LEVELS):
        print(f"noise {level:g}".ljust(13) + "".join(f"{name:>25}" for name in METRICS))
        for j, way in enumerate(WAYS):
            cells = [
                f"{float(m):.{places}f} ± {float(s):.{places}f}"
                for m, s, places in zip(mean[i, j], deviation[i, j], (1, 2, 1, 1), strict=True)
            ]
            print(f"{way:13}" + "".join(f"{cell:>25}" for cell in cells))
    for with_, without in ((2, 0), (5, 4)):
        gain = (found[:, :, with_] - found[:, :, without]).mean(0)
        for metric in (1, 2, 0):
            by = ", ".join(f"{float(g):+.2f}" for g in gain[:, metric])
            print(f"{WAYS[with_]} against {WAYS[without]}, {METRICS[metric]}: {by}")
    surest = torch.stack(curves).mean(0)[:, 2]
    listed = ", ".join(f"{way} {float(x):.0f}" for way, x in zip(WAYS, surest, strict=True))
    print(f"wrong among the surest 20 %, %, at noise {LEVELS[-1]:g}: {listed}")
    if sys.argv[1:] and sys.argv[1].endswith((".png", ".svg")):
        draw(found, torch.stack(curves), sys.argv[1])
        print(f"wrote {sys.argv[1]}")


if __name__ == "__main__":
    main()
