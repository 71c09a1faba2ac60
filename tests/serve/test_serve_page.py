"""The page of `cumulant serve`, clicked through in a browser by every one of its features."""

from __future__ import annotations

import json
import re
from urllib.parse import unquote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright

import cumulant as cm
from cumulant.serve.models import Models
from web_server import serving

QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run"),
)
WAIT = 60_000


@pytest.fixture(scope="module")
def server():
    with serving(Models([cm.lens.load(), cm.lens.load("smollm2")])) as client:
        yield client


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path="/usr/bin/chromium", args=[*QUIET])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, server):
    """A page on the server; at the end there must be no error and no outside request."""
    context = chromium.new_context(bypass_csp=False, accept_downloads=True)
    page = context.new_page()
    wrong: list[str] = []
    refusals = "status of 422"  # the browser's own line about an answer that says what is wrong
    page.on(
        "console",
        lambda m: (
            wrong.append(m.text)
            if m.type in ("error", "warning") and refusals not in m.text
            else None
        ),
    )
    page.on("pageerror", lambda e: wrong.append(str(e)))
    page.on(
        "request",
        lambda r: (
            None
            if r.url.startswith((f"http://{server.host}", "data:", "blob:"))
            else wrong.append(r.url)
        ),
    )
    page.set_default_timeout(WAIT)
    yield page
    context.close()
    assert wrong == []


def ready(page, at_least=1):
    page.wait_for_selector("body[data-ready]:not([data-busy])")
    while int(page.get_attribute("body", "data-ready")) < at_least:
        page.wait_for_timeout(50)
    page.wait_for_selector("body:not([data-busy])")
    return int(page.get_attribute("body", "data-ready"))


def act(page, do):
    """Do something, and wait until the screen has followed."""
    before = ready(page)
    do()
    ready(page, before + 1)


def state(page):
    return json.loads(unquote(page.url.split("#", 1)[1]))


def serious(page):
    """What axe finds wrong that would stop somebody."""
    found = Axe().run(page).response["violations"]
    return [
        (x["id"], x["nodes"][0]["html"][:120])
        for x in found
        if x["impact"] in ("serious", "critical")
    ]


def test_every_feature(page, server, tmp_path):
    page.goto(server.address)
    ready(page)
    tokens = page.locator(".token")
    expect(tokens.first).to_have_text("[CLS]")

    act(page, lambda: page.fill("#text-a", "Dogs chase cats. <b>Dogs</b> bark."))
    assert "<" in page.locator(".token").all_text_contents()
    assert page.locator(".tokens b").count() == 0  # text is text

    for name in ("log_normalizer", "effective_keys", "received", "sink_mass", "score_max", "class"):
        act(page, lambda name=name: page.select_option("#statistic", name))
        assert state(page)["statistic"] == name
    act(page, lambda: page.select_option("#statistic", "entropy"))
    act(page, lambda: page.check("#averaged"))
    act(page, lambda: page.uncheck("#averaged"))

    act(page, lambda: page.locator(".token").nth(3).click())
    act(page, lambda: page.locator('[data-plot="map"] .cell').nth(12 * 2 + 5).click())
    assert (state(page)["layer"], state(page)["head"], state(page)["token"]) == (2, 5, 3)
    expect(page.locator("#head-title")).to_contain_text("Layer 2, head 5, token 3")
    assert page.locator(".arc").count() > 0
    assert page.locator(".ellipse").count() == 2
    expect(page.locator("#plane-caption")).to_contain_text("of their variance")

    expect(page.locator("#difference")).to_contain_text("Choose a head")
    for kind in ("no_sink", "uniform", "gaussian", "skip"):
        act(page, lambda kind=kind: page.click(f"[data-change={kind}]"))
        expect(page.locator("#difference table")).to_be_visible()
        act(page, lambda kind=kind: page.click(f"[data-change={kind}]"))
    expect(page.locator("#changes li")).to_have_count(0)
    page.focus("#temperature")
    act(page, lambda: page.keyboard.press("End"))
    expect(page.locator("#changes li")).to_contain_text("temperature 4")
    page.fill("#swap", "cows")
    act(page, lambda: page.press("#swap", "Enter"))
    assert "cows" in page.locator(".token").all_text_contents()
    act(page, lambda: page.locator("#changes button").nth(1).click())
    assert "cows" not in page.locator(".token").all_text_contents()

    page.click("#depth-ask")
    page.wait_for_selector('[data-plot="depth"] svg')
    page.fill("#toward", "wolf")
    page.press("#toward", "Enter")
    page.wait_for_selector('[data-plot="tangent"] svg')
    expect(page.locator("#tangent-caption")).to_contain_text("first-order change misses")

    page.check("#compare")
    ready(page)
    page.wait_for_selector(".strip >> nth=1")
    with page.expect_download() as waiting:
        page.click("#save")
    saved = tmp_path / "view.html"
    waiting.value.save_as(saved)

    # The saved file shows the same without a server, and asks nobody for anything.
    texts = page.locator(".token").all_text_contents()
    other = page.context.new_page()
    outside: list[str] = []
    other.on(
        "request",
        lambda r: outside.append(r.url) if not r.url.startswith(("file:", "data:")) else None,
    )
    other.goto(saved.as_uri())
    other.wait_for_selector(".token")
    assert other.locator(".token").all_text_contents() == texts
    expect(other.locator("#status")).to_contain_text("saved view")
    expect(other.locator("#changes li")).to_contain_text("temperature 4")
    assert outside == []
    content = saved.read_text()
    assert server.token not in content

    # The address reproduces the view.
    again = page.context.new_page()
    again.goto(page.url)
    again.wait_for_selector(".strip >> nth=1", timeout=WAIT)
    assert again.locator(".token").all_text_contents() == texts
    assert state(again) == state(page)


def test_a_decoder_shows_the_next_token_and_two_models_stand_side_by_side(page, server):
    page.goto(server.address)
    ready(page)
    expect(page.locator("#next-box")).to_be_hidden()
    act(page, lambda: page.select_option("#model-a", "1"))
    expect(page.locator("#next-box")).to_be_visible()
    act(page, lambda: page.click("[data-change=skip]"))
    expect(page.locator('[data-plot="next"] .legend')).to_contain_text("original")
    page.check("#compare")
    page.wait_for_selector(".strip >> nth=1")
    expect(page.locator('[data-plot="map"] h3')).to_have_count(2)


def test_the_keyboard_is_enough(page, server):
    page.goto(server.address)
    ready(page)
    page.locator('.token[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    act(page, lambda: page.keyboard.press("Enter"))
    assert state(page)["token"] == 3
    page.locator('[data-plot="map"] .cell[tabindex="0"]').focus()
    page.keyboard.press("ArrowDown")
    act(page, lambda: page.keyboard.press("Enter"))
    assert state(page)["layer"] == 1


@pytest.mark.parametrize("width", [380, 800, 1280])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_width_and_theme(page, server, width, theme):
    page.emulate_media(color_scheme=theme)
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(server.address)
    ready(page)
    act(page, lambda: page.click("[data-change=uniform]"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert serious(page) == []


@pytest.mark.parametrize(
    "hash", ["%", "{}", '{"a":5}', '{"a":{"text":7},"layer":1e9,"statistic":"<img>"}', "x" * 5000]
)
def test_a_strange_address_falls_back_to_the_start(page, server, hash):
    page.goto(f"{server.address}#{hash}")
    ready(page)
    expect(page.locator(".token").first).to_have_text("[CLS]")


def test_an_error_is_shown_in_words_and_goes_away(page, server):
    page.goto(server.address)
    ready(page)
    page.evaluate("document.getElementById('text-a').removeAttribute('maxlength')")
    page.fill("#text-a", "word " * 700)
    expect(page.locator("#problem")).to_contain_text(
        re.compile("tokens; the limit is"), timeout=WAIT
    )
    act(page, lambda: page.fill("#text-a", "A short text."))
    expect(page.locator("#problem")).to_be_hidden()
    page.context.clear_cookies()
