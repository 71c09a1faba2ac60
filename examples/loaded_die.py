"""Jaynes' die: what the average says about the faces.

A die was thrown many times and averaged 4.5. The maximum-entropy weights with that mean are the
fair die, tilted. The link gives the tilt, and the dual the distance KL from the fair die: the
chance that n throws of a fair die average that much decays like exp(-n KL).
Run it: python examples/loaded_die.py
"""

import torch

import cumulant as cm


def main() -> None:
    faces = torch.arange(1.0, 7.0, dtype=torch.float64)
    fair = cm.Empirical(faces[:, None], torch.full((6,), 1 / 6, dtype=torch.float64).log())
    for average in (3.5, 4.5, 5.5):
        mean = torch.tensor([average], dtype=torch.float64)
        tilt, distance = float(fair.link(mean)), float(fair.dual(mean))
        print(f"average {average}: tilt {tilt:.3f}, KL from the fair die {distance:.3f}")
        for face, weight in zip(faces, cm.maximum_entropy(faces, average), strict=True):
            print(f"  {int(face)} {'#' * round(60 * float(weight))} {float(weight):.3f}")
    means = torch.tensor([[4.5], [6.0], [6.5]], dtype=torch.float64)
    print(fair.link(means, throw=False).status)


if __name__ == "__main__":
    main()
