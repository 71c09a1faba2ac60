"""The monitor's curves and the lens' pictures, drawn by a real browser at three widths."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
import transformers as hf
from torch import nn

import cumulant as cm
from browser import Browser, serious


@pytest.fixture(scope="module")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="module")
def curves(tmp_path_factory):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with warnings.catch_warnings(), cm.lens.Monitor(model, every=1) as monitor:
        warnings.simplefilter("ignore")
        for scale in (1.0, 4.0, 60.0):
            loss = model(scale * torch.randn(2, 6, 8)).sum()
            loss.backward()
            monitor.step(loss)
    return monitor.report(tmp_path_factory.mktemp("monitor") / "page.html")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=24,
        patch_size=8,
    )
    model = hf.ViTModel(config, add_pooling_layer=False).eval()
    image = np.random.default_rng(0).integers(0, 256, (24, 24, 3), "uint8")
    found = cm.lens.examine(model, None, images=image)
    return found, found.report(tmp_path_factory.mktemp("picture") / "page.html")


NARROW = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"


@pytest.mark.parametrize("width", [380, 800, 1280])
def test_curves_are_drawn_for_all_layers_and_for_one(browser, curves, width):
    browser.open(curves, width=width)
    count = "document.querySelectorAll('[data-plot=curves] .panel svg .dot').length"
    assert browser.run(count) == 6 * 3  # five figures and the loss, three steps
    assert browser.run(NARROW)
    assert browser.errors == []
    assert serious(browser) == []
    browser.choose("curve-layer", "1")
    assert browser.run(count) == 6 * 3
    assert "layer 1" in browser.run("document.getElementById('curve-meaning').textContent")


@pytest.mark.parametrize("width", [380, 1280])
def test_patches_are_drawn_on_the_picture(browser, picture, width):
    found, page = picture
    browser.open(page, width=width)
    assert browser.run("document.querySelectorAll('.patch').length") == 9
    assert browser.run(
        "document.querySelector('[data-plot=picture] image').getAttribute('href')"
    ).startswith("data:image/png;base64,")
    assert browser.run(NARROW)
    assert browser.errors == []
    assert serious(browser) == []
    browser.choose("picture-layer", "1")
    browser.choose("picture-head", "0")
    browser.choose("picture-statistic", "entropy")
    label = browser.run("document.querySelectorAll('.patch')[4].getAttribute('aria-label')")
    table = found.table().query("layer == 1 and head == 0 and token == 5")
    assert label.startswith("patch 1,1. Entropy (nats) ")
    assert float(label.rsplit(" ", 1)[1]) == pytest.approx(table["entropy"].item(), rel=6e-3)
