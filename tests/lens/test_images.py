"""Images through vision models: patches as tokens, received mass, the picture in the report."""

from __future__ import annotations

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import cumulant as cm
from command import cumulant
from cumulant.core.errors import InputError

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}


def vit():
    return hf.ViTModel(hf.ViTConfig(intermediate_size=16, **SMALL), add_pooling_layer=False)


def dinov2():
    return hf.Dinov2Model(hf.Dinov2Config(**SMALL))


def with_registers():
    return hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(num_register_tokens=2, **SMALL))


def clip_tower():
    return hf.CLIPVisionModel(hf.CLIPVisionConfig(intermediate_size=16, **SMALL))


MODELS = {
    "vit": (vit, ["[CLS]"]),
    "dinov2": (dinov2, ["[CLS]"]),
    "registers": (with_registers, ["[CLS]", "[REG 0]", "[REG 1]"]),
    "clip": (clip_tower, ["[CLS]"]),
}


def built(name, sharp=6.0):
    """With larger weights than at the start, so that heads do not all look alike."""
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(sharp)
    return model


def picture(height=30, width=40):
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 8, columns * 6, rows + columns], -1).astype(np.uint8)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_special_ones_and_patches_row_by_row(name):
    model, special = built(name), MODELS[name][1]
    found = cm.lens.examine(model, None, images={"one": picture(), "two": picture(20, 20)})
    names = [*special, *(f"patch {r},{c}" for r in range(3) for c in range(3))]
    assert found.shown == [["one", names], ["two", names]]
    table = found.table()
    assert len(table) == 2 * 2 * 2 * len(names)
    assert table["token"].max() == len(names) - 1
    assert found.run["texts"] == 2
    assert found.inputs()["tokens"].tolist() == [len(names)] * 2


@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_models_own_weights(name):
    model = built(name)
    seen = (picture(24, 24), picture(24, 24)[::-1].copy())
    found = cm.lens.examine(model, None, images=list(seen)).table()
    model.set_attn_implementation("eager")
    pixels = torch.from_numpy(np.stack(seen)).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        weights = model(pixel_values=pixels, output_attentions=True).attentions
    p = torch.stack(weights).double().transpose(0, 1)  # image, layer, head, query, key
    expected = {
        "received": p.mean(-2),
        "entropy": -(p * p.clamp_min(1e-300).log()).sum(-1),
        "sink_mass": p[..., 0],
    }
    for column, x in expected.items():
        np.testing.assert_allclose(found[column], x.flatten(), rtol=2e-4, atol=1e-5)


def test_the_report_shows_what_the_model_saw(tmp_path):
    found = cm.lens.examine(built("vit"), None, images=picture(24, 24))
    again = cm.lens.Examination.load(found.save(tmp_path / "saved"))
    page = again.report(tmp_path / "page.html").read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])
    [shown] = data["pictures"]
    assert (shown["rows"], shown["columns"], shown["special"]) == (3, 3, 1)
    with Image.open(io.BytesIO(base64.b64decode(shown["png"]))) as image:
        np.testing.assert_allclose(np.asarray(image), picture(24, 24), atol=1)
    assert "received" in data["texts"][0]["calls"]["0"]["statistics"]
    assert 'id="picture-statistic"' in page
    assert "1 image" in page


def test_texts_have_no_pictures(tmp_path):
    model, tokenizer, *_ = cm.lens.load()
    found = cm.lens.examine(model, tokenizer, "Attention is a tilted measure.")
    assert "received" not in found.table()
    assert 'id="picture-statistic"' not in found.report(tmp_path / "x.html").read_text("utf-8")


def test_a_processor_is_used_where_there_is_one():
    class Processor:
        image_mean, image_std = [0.0] * 3, [1.0] * 3

        def __call__(self, images, return_tensors):
            assert [x.shape for x in images] == [(30, 40, 3)]
            return {"pixel_values": torch.full((1, 3, 16, 24), 0.2)}

    torch.manual_seed(0)
    config = hf.Dinov2Config(**SMALL)
    found = cm.lens.examine(hf.Dinov2Model(config).eval(), Processor(), images=picture())
    assert found.pictures[0]["rows"] == 2
    assert found.pictures[0]["columns"] == 3
    with Image.open(io.BytesIO(base64.b64decode(found.pictures[0]["png"]))) as image:
        assert np.asarray(image).tolist() == np.full((16, 24, 3), 51).tolist()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("missing.png", "there is no image missing.png"),
        (np.zeros((4, 4, 3)), "must be bytes of shape"),
        ([np.zeros((0, 4, 3), np.uint8)], "must be bytes of shape"),
        ([], "no text or image"),
    ],
)
def test_images_are_checked(images, message):
    with pytest.raises(InputError, match=message):
        cm.lens.examine(built("vit"), None, images=images)


def test_models_without_a_grid_of_patches_are_refused():
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    with pytest.raises(InputError, match="not one grid"):
        cm.lens.examine(hf.SwinModel(config).eval(), None, images=picture())
    bert = hf.BertModel(
        hf.BertConfig(
            num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16
        )
    )
    with pytest.raises(InputError, match="takes input_ids, not images"):
        cm.lens.examine(bert, None, images=picture())
    with pytest.raises(InputError, match="texts or images, not both"):
        cm.lens.examine(built("vit"), None, "a text", images=picture())


def test_the_command_draws_an_image(tmp_path):
    built("clip").save_pretrained(tmp_path / "model")
    Image.fromarray(picture()).save(tmp_path / "cat.png")
    given = ["--image", str(tmp_path / "cat.png"), "-o", str(tmp_path / "out"), "--json"]
    done = cumulant("lens", "--model", str(tmp_path / "model"), *given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["image"] == "cat.png"
    assert 'id="picture-image"' in (tmp_path / "out" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "none.png"], "there is no image none.png"),
        (["--image", "x.txt"], "is not an image"),
        (["--image", "x.png"], "give its folder"),
        (["--image", "x.png", "--text", "a"], "--image takes no text"),
    ],
)
def test_bad_images_are_one_line_and_exit_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    Image.fromarray(picture()).save(tmp_path / "x.png")
    done = cumulant("lens", *arguments, "-o", str(tmp_path / "out"))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
