"""The second device of the tests does what a device does."""

import pytest
import torch

import other_device
from other_device import OtherTensor, counted, moved, to_host, to_other


def test_values_and_gradients_are_real():
    x = torch.randn(3, 4, requires_grad=True)
    y = to_other(x)
    (y.exp() @ y.mT).sum().backward()
    (x.exp() @ x.mT).sum().backward()
    assert {y.device.type, y.grad.device.type} == {"other"}
    torch.testing.assert_close(to_host(y.grad), x.grad)


def test_devices_do_not_mix():
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match="two devices meet in add"):
        to_other(x) + x
    assert to_host(to_other(x) + torch.tensor(1.0)).sum() == 6  # numbers may


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
        lambda x: x.tolist(),
        lambda x: torch.equal(x, x),
        lambda x: torch.ones(3).to(x.device),
        lambda x: torch.ones(3).copy_(x),
    ],
)
def test_waiting_is_counted(wait):
    x = to_other(torch.randn(3))
    with counted() as waits:
        wait(x)
    assert sum(waits.values()) == 1
    with counted() as waits:
        torch.where(x > 0, x, 0.0).sum().nan_to_num().masked_fill(x[0] == 0, 1.0)
    assert not waits


def test_a_forgotten_device_is_found():
    """Tests make tensors on the device, the package where it says: there a forgotten one raises."""
    with moved():
        x = torch.randn(3)
        assert type(x) is type(torch.tensor([1.0])) is OtherTensor
        forgetful = {"torch": torch}
        exec(compile("made = torch.zeros(3)", "package.py", "exec"), forgetful)
        assert not isinstance(forgetful["made"], OtherTensor)
        with pytest.raises(RuntimeError, match="two devices"):
            x + forgetful["made"]
    assert x.device == other_device.DEVICE
