"""The page that plays a run: in a browser, without a network."""

from __future__ import annotations

import base64
import io
import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

import cumulant as cm
from browser import Browser, keep
from cumulant.pages import film_page


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
    run = cm.dynamics.simulate(x, 20, contraction=cm.dynamics.Sphere(), beta=4.0)
    return run.animate(tmp_path_factory.mktemp("film") / "film.html", frames=7)


def test_nothing_in_the_page_asks_for_anything(page):
    text = re.sub(r"base64,[^\"]*", "", page.read_text())
    assert not re.findall(r"https?:|//[a-z]|@import|url\(", text)
    assert set(re.findall(r'(?:src|href)="([^",;]*)', text)) == {"data:image/png", "data:"}
    assert "default-src 'none'" in text


def test_frames_are_the_run(page):
    found = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page.read_text())
    times = [f"t = {k}: " for k in (0, 3, 7, 10, 13, 17, 20)]
    assert all(alt.startswith(t) for t, (_, alt) in zip(times, found, strict=True))
    counts = [int(re.fullmatch(r"(\d+) clusters?", alt.split(": ")[1])[1]) for _, alt in found]
    # In the first frame no two of the points are close; 60 points of one cloud end in few groups.
    assert counts[0] > 20 > counts[-1] >= 1
    assert counts == sorted(counts, reverse=True)
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(x)))) for x, _ in found]
    assert {x.shape for x in pictures} == {(720, 690, 4)}
    assert all((a != b).any() for a, b in pairwise(pictures))


@pytest.mark.parametrize("dark", [False, True])
def test_the_player_shows_and_works(browser, page, tmp_path, dark):
    browser.open(page, width=720, height=960, dark=dark)
    shown = "[...document.images].findIndex((x) => !x.hidden)"
    label = "document.getElementById('play').textContent"
    button = "document.getElementById('{}')".format
    assert browser.run("[...document.images].every((x) => x.complete && x.naturalWidth === 690)")
    # The browser asks for less motion, so the film waits.
    assert (browser.run(shown), browser.run(label)) == (0, "Play")
    browser.click(button("next"))
    browser.click(button("next"))
    browser.click(button("back"))
    assert browser.run(shown) == 1
    assert browser.run("document.getElementById('time').textContent").startswith("t = 3: ")
    browser.run("document.getElementById('frame').focus()")
    browser.press("End", "ArrowLeft")
    assert browser.run(shown) == 5
    keep(browser, tmp_path, f"film-{'dark' if dark else 'light'}")
    browser.click(button("loop"))
    browser.click(button("play"))
    assert browser.run(label) == "Pause"
    ended = "new Promise((r) => setInterval(() => document.getElementById('play').textContent"
    browser.run(f"{ended} === 'Play' && r(true), 20))")
    assert browser.run(shown) == 6
    browser.choose("speed", "2")
    browser.click(button("play"))
    assert browser.run(label) == "Pause"
    browser.click(button("play"))
    assert browser.run(label) == "Play"
    assert browser.errors == []
    assert [x for x in browser.requests if not x.startswith(("file:", "data:"))] == []


def test_captions_are_text():
    text = film_page([b"x"], ['<b onclick="a">{{ digest }}'], 5)
    assert 'alt="&lt;b onclick=&quot;a&quot;&gt;{{ digest }}"' in text


def test_the_film_of_a_card_plays_and_stands_still_where_motion_is_unwelcome(browser, tmp_path):
    """One frame at a time, one after another; the last one for readers who want less motion."""
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(0))
    run = cm.dynamics.simulate(x, 20, contraction=cm.dynamics.Sphere(), beta=4.0)
    path = tmp_path / "card.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{run._repr_html_()}", encoding="utf-8")
    browser.open(path, width=900)
    browser.run("document.querySelector('details').open = true")
    browser.settle()
    shown = (
        "[...document.querySelectorAll('details svg g')].map((g, i) =>"
        " getComputedStyle(g).visibility === 'visible' ? i : -1).filter(i => i >= 0)"
    )
    last = browser.run("document.querySelectorAll('details svg g').length") - 1
    assert last > 5
    assert browser.run(shown) == [last]
    browser.call("Emulation.setEmulatedMedia", features=[])
    browser.settle()
    seen = browser.run(
        "new Promise(done => { const seen = new Set(); const look = () => {"
        f" const now = {shown}; seen.add(now.join()); seen.size > 4 ? done([...seen])"
        " : requestAnimationFrame(look); }; look(); })"
    )
    # Two neighbors may meet at the very moment of the change; there is never none.
    found = [[int(k) for k in frame.split(",") if k] for frame in seen]
    assert all(f and f[-1] - f[0] < 2 for f in found), found
    assert browser.errors == []
    browser.media()
