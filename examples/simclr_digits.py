"""SimCLR (Chen et al., 2020) on scikit-learn's digits: what unlabeled pictures are worth.

A small convolutional network learns, from two random views of every training picture, to tell which
views belong together. Then a linear classifier is fitted with few labels: on the pixels, on what
the network said before training, and on what it says after. All choices were made on a validation
part; the test part is only counted.
Run it: python examples/simclr_digits.py (needs scikit-learn; less than a minute on one core)
"""

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F

import cumulant as cm

EPOCHS, BATCH, RATE, TEMPERATURE = 60, 256, 3e-3, 0.2
LABELS = [5, 10, 20, None]  # for each class; None: all
PENALTIES = [0.01, 0.1, 1.0, 10.0, 100.0]
TRIALS = 10
TRAINING, VALIDATION, TEST = slice(0, 1000), slice(1000, 1300), slice(1300, None)


def views(x: Tensor) -> Tensor:
    """Each picture turned, scaled, shifted, partly erased and with noise, all at random."""
    n = len(x)
    angle, scale = 0.25 * torch.randn(n), 1 + 0.15 * torch.randn(n)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    shift = 0.25 * (2 * torch.rand(n, 2) - 1)
    turn = torch.stack([cos, -sin, shift[:, 0], sin, cos, shift[:, 1]], -1).view(n, 2, 3)
    out = F.grid_sample(
        x, F.affine_grid(turn, list(x.shape), align_corners=False), align_corners=False
    )
    corner = torch.randint(0, 7, (n, 2, 1))
    near = (torch.arange(8) >= corner) & (torch.arange(8) < corner + 2)
    erased = near[:, 0, :, None] & near[:, 1, None, :]
    return out.masked_fill(erased[:, None], 0.0) + 0.1 * torch.randn_like(out)


def network() -> tuple[nn.Module, nn.Module]:
    """The encoder, whose output is used later, and the head, which only the loss sees."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Flatten(),
    )
    head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64))
    return encoder, head


def train(encoder: nn.Module, head: nn.Module, x: Tensor) -> None:
    """Both views of a picture shall be alike, and unlike the views of all others in the batch."""
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], RATE)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            first, second = head(encoder(torch.cat([views(x[rows]), views(x[rows])]))).chunk(2)
            loss = cm.contrastive.nt_xent(first, second, TEMPERATURE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        slower.step()
        if epoch % 20 == 19:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")


def some(label: Tensor, count: int | None, trial: int) -> Tensor:
    """Rows of so many training pictures of each class, others in each trial."""
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(trial))
    return torch.cat([order[label[order] == c][:count] for c in range(10)])


def probe(z: Tensor, label: Tensor, count: int | None, part: slice, penalty: float) -> Tensor:
    """Percent right in this part of a linear classifier, for several choices of labels."""
    right = list[float]()
    for trial in range(TRIALS if count else 1):
        rows = some(label[TRAINING], count, trial)
        line = LogisticRegression(C=penalty, max_iter=3000)
        line.fit(z[TRAINING][rows].numpy(), label[TRAINING][rows].numpy())
        right.append(100 * line.score(z[part].numpy(), label[part].numpy()))
    return torch.tensor(right, dtype=torch.float64)


def tested(z: Tensor, label: Tensor, count: int | None) -> Tensor:
    """The same on the test part, with the penalty that is best on the validation part."""

    def validated(penalty: float) -> float:
        return float(probe(z, label, count, VALIDATION, penalty).mean())

    return probe(z, label, count, TEST, max(PENALTIES, key=validated))


def main() -> None:
    torch.manual_seed(0)
    data = load_digits()
    order = torch.randperm(len(data.target))
    x = torch.from_numpy(data.images).float()[order, None] / 16
    label = torch.from_numpy(data.target)[order]
    encoder, head = network()

    def encoded() -> Tensor:
        with torch.no_grad():
            return encoder.eval()(x)

    ways = {"pixels": x.flatten(1), "untrained": encoded()}
    encoder.train()
    train(encoder, head, x[TRAINING])
    ways["SimCLR"] = encoded()

    print(
        f"right of {len(x[TEST])} test digits, % (standard error over {TRIALS} choices of labels)"
    )
    print("labels per class  " + "".join(f"{name:>14}" for name in ways))
    better = list[str]()
    for count in LABELS:
        found = {name: tested(z, label, count) for name, z in ways.items()}
        told = [
            f"{y.mean():.1f}" + (f" ({y.std() / len(y) ** 0.5:.1f})" if count else "      ")
            for y in found.values()
        ]
        print(f"{count or 'all':>16}  " + "".join(f"{text:>14}" for text in told).rstrip())
        gain = found["SimCLR"].mean() - max(found["pixels"].mean(), found["untrained"].mean())
        better.append(f"{gain:+.1f} ({count or 'all'})")
    print(f"SimCLR against the better of the others, by labels: {', '.join(better)}")


if __name__ == "__main__":
    main()
