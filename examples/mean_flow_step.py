"""MeanFlow training steps (Geng et al., 2025) through an ordinary transformer layer.

The loss contains a Jacobian-vector product of the network, and is then backpropagated. With
torch's fused attention this fails; `cm.differentiable()` is the one line that makes it work.
`mean_flow_digits.py` trains a whole model this way.
Run it: python examples/mean_flow_step.py
"""

import torch
from torch.func import jvp

import cumulant as cm


class Field(torch.nn.Module):
    """u(z, t): a transformer layer with the time added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.time = torch.nn.Linear(1, 32)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.layer(z + self.time(t))


def main() -> None:
    torch.manual_seed(0)
    field = Field()
    optimizer = torch.optim.Adam(field.parameters(), 1e-3)
    data = torch.randn(16, 10, 32)
    recent: list[float] = []
    for step in range(200):
        noise, t = torch.randn_like(data), torch.rand(16, 1, 1)
        z, velocity = (1 - t) * data + t * noise, noise - data
        with cm.differentiable():
            u, slope = jvp(field, (z, t), (velocity, torch.ones_like(t)))
            loss = ((u - (velocity - t * slope).detach()) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        recent.append(loss.item())
        if len(recent) == 50:
            print(f"steps {step - 48:3d} to {step + 1:3d}   mean loss {sum(recent) / 50:.4f}")
            recent.clear()


if __name__ == "__main__":
    main()
