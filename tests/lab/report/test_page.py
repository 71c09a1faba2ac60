"""The report in a real browser: it draws, its panels compute what the library computes."""

from __future__ import annotations

import json
import re
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from made_parts import entry, ledger, made_parts, series

import cumulant as cm
from browser import CONTRAST, Browser, keep, serious
from cumulant.core.errors import InputError
from cumulant.lab.report import Parts, render

QUERY, CLOUD = "document.getElementById('query-panel')", "document.getElementById('cloud-panel')"
SECTIONS = ["answers", "opening", "query", "cloud", "ledger", "lens", "series", "benchmarks", "run"]
NASTY = "<script>document.title='run'</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    return written(made_parts(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def written(parts: Parts, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(render(parts), encoding="utf-8")
    return path


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll('{selector}')].map(e => e.innerText.trim())")


def slide(browser: Browser, name: str, value: float) -> None:
    browser.run(
        f"(s => {{ s.value = {value}; s.dispatchEvent(new Event('input')); }})"
        f"(document.getElementById('{name}'))"
    )
    browser.settle()


def data(browser: Browser, panel: str, name: str) -> Any:
    return json.loads(browser.run(f"{panel}.dataset.{name}"))


def tensor(browser: Browser, panel: str, name: str) -> torch.Tensor:
    return torch.tensor(data(browser, panel, name), dtype=torch.float64)


def wait(browser: Browser, condition: str) -> None:
    browser.run(
        "new Promise((done, fail) => { setTimeout(fail, 10000); const look = () =>"
        f" {condition} ? done() : requestAnimationFrame(look); look(); }})"
    )


def open_all(browser: Browser) -> None:
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.settle()


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_draws_everything_and_asks_for_nothing(browser, page, tmp_path, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.errors == []
    assert [u for u in browser.requests if not u.startswith("data:")] == [page.as_uri()]
    assert (
        browser.run("[...document.querySelectorAll('main > section')].map(s => s.id)") == SECTIONS
    )
    open_all(browser)
    for plot in ("query", "halves", "map", "depth", "series", "benchmarks"):
        drawn = f"document.querySelectorAll('[data-plot={plot}] svg *').length"
        assert browser.run(drawn) > 3, plot
    colors = browser.run(
        "(c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height)"
        ".data.buffer)).size)(document.getElementById('cloud-canvas'))"
    )
    assert colors > 20
    sizes = browser.run(
        "[...document.querySelectorAll('.drawn svg')].map(s => s.getBoundingClientRect())"
        ".map(b => [b.width, b.height])"
    )
    assert len(sizes) == 3 + browser.run("document.querySelectorAll('#answers svg').length")
    wide = browser.run("document.querySelector('.drawn .scroll').clientWidth")
    if width > 640:
        assert min(min(s) for s in sizes) > 200
    else:  # first the whole figure, then as large as it was drawn, in a box that scrolls
        assert max(w for w, _ in sizes) <= wide + 40
        browser.run("document.querySelectorAll('.enlarge').forEach(b => b.click())")
        browser.settle()
        large = browser.run(
            "[...document.querySelectorAll('.drawn svg')].map(s => s.getBoundingClientRect())"
            ".map(b => [b.width, b.height])"
        )
        assert min(min(s) for s in large) > 200
    assert browser.run("document.documentElement.scrollWidth") <= width
    keep(browser, tmp_path, f"page-{width}-{'dark' if dark else 'light'}")


def test_figures_stand_beside_their_answers_and_can_have_the_whole_page(browser, page):
    browser.open(page, width=1280)
    first = "document.querySelector('.question .enlarge')"
    says = "document.querySelector('.question .says').getBoundingClientRect().right"
    assert browser.run(f"{says} < {first}.closest('figure').getBoundingClientRect().left")
    drawn = f"{first}.closest('figure').querySelector('svg, img').getBoundingClientRect().width"
    small = browser.run(drawn)
    browser.click(first)
    assert browser.run(drawn) > 1.5 * small > 900
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    browser.click(first)
    assert browser.run(drawn) == pytest.approx(small)


@pytest.mark.parametrize("width", [360, 380])
def test_long_names_of_claims_fit_a_phone(browser, page, width):
    browser.open(page, width=width)
    browser.run("document.querySelector('#T17 .number').textContent = 'link-over-training'")
    browser.settle()
    assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable(browser, page, dark):
    browser.open(page, dark=dark)
    open_all(browser)
    *poor, (checked, _, _) = browser.run(CONTRAST)
    assert checked > 300
    assert poor == []


@pytest.mark.parametrize("width", [380, 800, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_serious(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    open_all(browser)
    assert serious(browser) == []


def test_formulas_are_typeset(browser, page):
    browser.open(page)
    formulas = browser.run(
        "[...document.querySelectorAll('#opening math')].map(m => m.getBoundingClientRect())"
        ".map(b => [b.width, b.height])"
    )
    assert len(formulas) == 3
    assert min(w for w, _ in formulas) > 80
    # The index of the sum stands below the sign, as only mathematics has it.
    sign, index = browser.run(
        "(m => [m.children[0], m.children[1]].map(e => e.getBoundingClientRect().bottom))"
        "(document.querySelector('#opening munder, #opening munderover, #opening msub'))"
    )
    assert index > sign


def move(browser: Browser, *keys: str) -> None:
    browser.run("document.querySelector('.handle').focus()")
    browser.press(*keys)


@pytest.mark.parametrize("keys", ["clusters", "ring", "line"])
@pytest.mark.parametrize("beta", [0.0, 1.5, 6.0])
def test_the_query_panel_computes_what_the_library_does(browser, page, keys, beta):
    browser.open(page)
    browser.click(f"document.querySelector('[data-keys={keys}]')")
    slide(browser, "query-beta", beta)
    move(browser, "ArrowLeft", "ArrowDown", "ArrowDown")
    points, query = (tensor(browser, QUERY, name) for name in ("keys", "query"))
    assert points.shape == (40, 2)
    a = cm.attend(query[None], points, scale=beta)
    tilted = cm.Empirical(points)
    torch.testing.assert_close(tensor(browser, QUERY, "logNormalizer"), a.log_normalizer[0])
    torch.testing.assert_close(tensor(browser, QUERY, "entropy"), a.entropy[0])
    torch.testing.assert_close(tensor(browser, QUERY, "mean"), a.key_mean[0])
    torch.testing.assert_close(
        tensor(browser, QUERY, "covariance"),
        tilted.covariance(beta * query[None])[0],
        rtol=1e-9,
        atol=1e-12,
    )
    shown = [texts(browser, f"#query-{n}")[0] for n in ("log-normalizer", "entropy", "effective")]
    assert float(shown[0]) == pytest.approx(float(a.log_normalizer[0]), abs=6e-4)
    assert float(shown[1]) == pytest.approx(float(a.entropy[0]), abs=6e-4)
    assert shown[2] == f"{float(a.entropy[0].exp()):.1f} of 40"


def test_contours_are_those_of_g(browser, page):
    browser.open(page)
    points, query = (tensor(browser, QUERY, name) for name in ("keys", "query"))
    beta = data(browser, QUERY, "beta")
    width = browser.run("document.querySelector('.plane').viewBox.baseVal.width")
    lines = browser.run(
        "[...document.querySelectorAll('.contour')].map(p => p.getAttribute('d'))"
        ".filter(d => d.length)"
    )
    assert len(lines) >= 8
    h = cm.Empirical(points)
    levels = []
    for line in lines:
        pixels = torch.tensor(
            [float(x) for x in re.findall(r"[\d.]+", line)], dtype=torch.float64
        ).reshape(-1, 2)
        at = (pixels / width * 2 - 1) * 2.6 * torch.tensor([1.0, -1.0])
        G = h.log_normalizer(beta * at)
        assert float(G.max() - G.min()) < 0.1
        levels.append(float(G.median()))
    through = float(h.log_normalizer(beta * query[None]))
    assert levels[-1] == pytest.approx(through, abs=0.02)  # the bold one runs through the query
    steps = torch.tensor(levels[:-1]).diff()
    torch.testing.assert_close(steps, steps[:1].expand_as(steps), rtol=0.1, atol=0)


def test_the_query_moves_by_keyboard_and_by_dragging(browser, page):
    browser.open(page)
    start = data(browser, QUERY, "query")
    move(browser, "ArrowRight", "ArrowUp", "ArrowUp")
    assert data(browser, QUERY, "query") == pytest.approx([start[0] + 0.1, start[1] + 0.2])
    move(browser, "Home")
    assert data(browser, QUERY, "query") == [0, 0]
    move(browser, *["ArrowLeft"] * 40)  # the edge holds
    assert data(browser, QUERY, "query")[0] == -2.6
    label = browser.run("document.querySelector('.handle').getAttribute('aria-valuetext')")
    assert label.startswith("−2.60, 0.00; mean −1.")
    x, y = browser.place("document.querySelector('.handle')")
    browser.settle()
    for kind, dx, dy in (("Pressed", 0, 0), ("Moved", 60, 20), ("Moved", 200, 40)):
        rest = {"type": f"mouse{kind}", "x": x + dx, "y": y + dy, "button": "left", "clickCount": 1}
        browser.call("Input.dispatchMouseEvent", **rest)
    browser.call(
        "Input.dispatchMouseEvent", type="mouseReleased", x=x + 200, y=y + 40, button="left"
    )
    unit = browser.run("document.querySelector('.plane').getBoundingClientRect().width / 5.2")
    assert data(browser, QUERY, "query") == pytest.approx(
        [-2.6 + 200 / unit, -40 / unit], abs=3 / unit
    )


def test_a_finger_drags_the_query_and_scrolls_elsewhere(browser, page):
    browser.open(page, width=380, height=740)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)

    def touch(kind: str, *points: tuple[float, float]) -> None:
        touched = [{"x": x, "y": y} for x, y in points]
        browser.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=touched)

    def drag(x: float, y: float) -> tuple[list[float], float]:
        touch("Start", (x, y))
        for k in range(1, 8):
            touch("Move", (x - 5 * k, y + 12 * k))
        touch("End")
        browser.settle()
        return data(browser, QUERY, "query"), browser.run("scrollY")

    try:
        left, above = browser.place("document.querySelector('.plane')")
        browser.settle()
        unit = browser.run("document.querySelector('.plane').getBoundingClientRect().width / 5.2")
        touch("Start", (left - 2 * unit, above))  # a tap moves it
        touch("End")
        wait(browser, f"JSON.parse({QUERY}.dataset.query)[0] < -1.9")
        x, y = browser.place("document.querySelector('.handle')")
        browser.settle()
        before, top = data(browser, QUERY, "query"), browser.run("scrollY")
        dragged, after = drag(x, y)
        assert after == top
        goal = [before[0] - 35 / unit, before[1] - 84 / unit]
        assert dragged == pytest.approx(goal, abs=3 / unit)
        again, after = drag(x + 150, y - 40)
        assert again == dragged
        assert after < top
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


def test_what_is_read_out_waits_until_the_query_rests(browser, page):
    browser.open(page)
    said = "document.getElementById('query-said').textContent"
    wait(browser, said)
    before = browser.run(said)
    at_once = browser.run(
        "(handle => { handle.dispatchEvent(new KeyboardEvent('keydown', { key: 'Home' }));"
        f" return {said}; }})(document.querySelector('.handle'))"
    )
    assert data(browser, QUERY, "query") == [0, 0]
    assert at_once == before
    wait(browser, f"{said} !== {json.dumps(before)}")
    assert browser.run("document.getElementById('query-said').getAttribute('role')") == "status"


CONTRACTIONS = {
    "none": None,
    "sphere": cm.dynamics.Sphere(),
    "rms": cm.dynamics.RMSNorm(),
    "whiten": cm.dynamics.Whiten(),
}


@pytest.mark.parametrize("start", ["gaussian", "uniform", "ring", "groups"])
@pytest.mark.parametrize("contraction", list(CONTRACTIONS))
def test_a_step_of_the_cloud_is_the_librarys(browser, page, start, contraction):
    browser.open(page)
    browser.choose("cloud-start", start)
    browser.choose("cloud-contraction", contraction)
    slide(browser, "cloud-beta", 2.7)
    slide(browser, "cloud-size", 0.35)
    for _ in range(2):
        x = tensor(browser, CLOUD, "points")
        assert x.shape == (120, 2)
        browser.click("document.getElementById('cloud-step')")
        y = tensor(browser, CLOUD, "points")
        moved = cm.dynamics.step(x, beta=2.7, step_size=0.35)
        after = cm.dynamics.step(x, beta=2.7, step_size=0.35, contraction=CONTRACTIONS[contraction])
        torch.testing.assert_close(y, after, rtol=1e-10, atol=1e-12)
    lengths = [torch.pdist(z).mean() for z in (x, moved, after)]
    assert data(browser, CLOUD, "attention") == pytest.approx(float(lengths[1] / lengths[0]))
    assert data(browser, CLOUD, "contraction") == pytest.approx(float(lengths[2] / lengths[1]))
    smallest = float(cm.dynamics.expansion(x, moved).minimum)
    assert smallest >= 1
    assert data(browser, CLOUD, "smallest") == pytest.approx(smallest)
    assert data(browser, CLOUD, "spread") == pytest.approx(float(cm.dynamics.cloud_spread(y)))
    reach = 0.1 * float(cm.dynamics.cloud_norm(y))
    if start != "ring":  # whose gaps are all alike: whether they link is a matter of rounding
        found = int(cm.dynamics.clusters(y, distance=reach).count)
        assert data(browser, CLOUD, "clusters") == found
    assert texts(browser, "#cloud-steps") == ["2"]


def test_without_contraction_the_view_grows_until_it_stops(browser, page):
    browser.open(page)
    browser.choose("cloud-contraction", "none")
    slide(browser, "cloud-size", 1)
    first = data(browser, CLOUD, "view")
    step = "document.getElementById('cloud-step').click()"
    for _ in range(5):
        browser.run(step)
    browser.settle()
    far = tensor(browser, CLOUD, "points").abs().max()
    assert data(browser, CLOUD, "view") > max(first, float(far))
    browser.run(f"for (let i = 0; i < 40; i++) {step}")
    browser.settle()
    assert "grows forever" in texts(browser, "#cloud-said")[0]
    browser.click("document.getElementById('cloud-reset')")
    assert data(browser, CLOUD, "view") == pytest.approx(first)
    assert texts(browser, "#cloud-steps") == ["0"]
    assert browser.errors == []


def test_a_cloud_that_has_become_flat_says_so(browser, page):
    browser.open(page)
    browser.choose("cloud-start", "groups")
    browser.choose("cloud-contraction", "sphere")
    slide(browser, "cloud-beta", 9)
    slide(browser, "cloud-size", 1)
    step = "document.getElementById('cloud-step').click()"
    browser.run(f"for (let i = 0; i < 200; i++) {step}")
    assert "At rest" in texts(browser, "#cloud-said")[0]  # two points
    browser.choose("cloud-contraction", "whiten")
    before = data(browser, CLOUD, "points")
    browser.run(step)
    assert "flat" in texts(browser, "#cloud-said")[0]
    assert data(browser, CLOUD, "points") == before


STEPS = "Number(document.getElementById('cloud-steps').textContent)"


def test_it_plays_only_where_motion_is_welcome(browser, page):
    browser.open(page)  # asks for less motion
    browser.run("document.getElementById('cloud-canvas').scrollIntoView()")
    time.sleep(0.6)
    assert browser.run(STEPS) == 0
    browser.click("document.getElementById('cloud-play')")
    wait(browser, f"{STEPS} > 2")
    browser.click("document.getElementById('cloud-play')")
    stopped = browser.run(STEPS)
    assert texts(browser, "#cloud-said")[0].startswith(f"Step {stopped}:")
    assert len(data(browser, CLOUD, "points")) == 120
    calm = browser.media
    try:
        browser.media = lambda **_: browser.call("Emulation.setEmulatedMedia", features=[])
        browser.open(page)
        time.sleep(0.6)
        assert browser.run(STEPS) == 0  # out of sight
        browser.run("document.getElementById('cloud-canvas').scrollIntoView({block: 'center'})")
        wait(browser, f"{STEPS} > 2")
        assert texts(browser, "#cloud-play") == ["Pause"]
    finally:
        browser.media = calm


def test_every_control_can_be_reached_and_has_a_name(browser, page):
    browser.open(page)
    names = browser.run(
        "[...document.querySelectorAll('button, input, select, summary, [tabindex=\"0\"], a')]"
        ".map(e => [e.outerHTML.slice(0, 80), (e.getAttribute('aria-label') || e.textContent"
        " || (e.labels && e.labels[0] && e.labels[0].innerText) || '').trim()])"
    )
    assert len(names) > 40
    assert [html for html, name in names if not name and "hidden" not in html] == []
    browser.run("document.getElementById('query-beta').focus()")
    browser.press("ArrowRight")
    assert data(browser, QUERY, "beta") == pytest.approx(1.6)
    browser.run("document.getElementById('cloud-step').focus()")
    browser.press("Enter")
    assert browser.run(STEPS) == 1
    levels = browser.run(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))"
    )
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_ledger_marks_filters_and_opens(browser, page):
    browser.open(page)
    marks = browser.run(
        "[...document.querySelectorAll('.chip')].map(c => [c.querySelector('i').textContent,"
        " c.childNodes[1].textContent])"
    )
    assert marks == [
        *(["✓", "T1"], ["±", "T4"], ["✕", "T17"], ["?", "T29"]),
        *(["✓", "simclr"], ["!", "T30"], ["–", "T31"], ["?", "T32"]),
    ]
    assert texts(browser, "#ledger > .takeaway") == [
        "Of 8 claims, 2 hold, 1 holds with a correction, 1 does not hold in general, 2 are open, "
        "1 crashed, 1 was not run. T30, T32 came out differently than recorded."
    ]
    visible = "[...document.querySelectorAll('.entry')].filter(e => e.offsetHeight).map(e => e.id)"
    browser.click("document.querySelector('#ledger-controls [data-kind=open]')")
    assert browser.run(visible) == ["T29", "T32"]
    assert texts(browser, "#ledger-said") == ["2 of 8 claims shown"]
    browser.click("document.querySelector('#ledger-controls [data-evidence=empirical]')")
    assert browser.run(visible) == ["T29"]
    assert "empirical" in texts(browser, "#T29 summary")[0]
    browser.click("document.querySelector('#ledger-controls [data-evidence=identity]')")
    assert browser.run(visible) == ["T32"]
    assert texts(browser, "#slips ~ ul li") == ["T1: Eq. (1) prints b."]
    # A link opens its claim, whatever the filter.
    browser.click("document.querySelector('#answers a[href=\"#T17\"]')")
    assert len(browser.run(visible)) == 8
    opened = "[...document.querySelectorAll('.entry details[open]')].map(d => d.parentElement.id)"
    assert browser.run(opened) == ["T17"]
    browser.click("document.getElementById('ledger-open')")
    assert len(browser.run(opened)) == 8
    browser.click("document.getElementById('ledger-open')")
    assert browser.run(opened) == []


def test_an_address_opens_its_claim(browser, page):
    browser.open(page)
    browser.run("location.hash = '#T4'")
    browser.settle()
    browser.settle()
    assert browser.run("document.querySelector('#T4 details').open")
    top = browser.run("document.getElementById('T4').getBoundingClientRect().top")
    assert 0 <= top < 120
    browser.call("Page.reload")
    browser._until(lambda m: m.get("method") == "Page.loadEventFired", "reloading")
    browser.settle()
    assert browser.run("document.querySelector('#T4 details').open")


def test_an_entry_tells_numbers_bounds_and_outcomes(browser, page):
    browser.open(page)
    open_all(browser)
    rows = (
        "[...document.querySelectorAll('#{} .numbers tbody tr')]"
        ".map(r => [...r.cells].map(c => c.innerText.replace('\\n', ' ')))"
    )
    assert browser.run(rows.format("T4")) == [
        ["largest error against quadrature drafted", "1.71", "≤ 10⁻⁸", "statement", "✕ failed"],
        [
            "largest error against quadrature mended",
            "3.20·10⁻¹³",
            "≤ 10⁻⁸",
            "correction",
            "✓ passed",
        ],
    ]
    assert browser.run(rows.format("T29")) == [
        [
            "slope of the fit slope",
            "0.420 ± 0.015",
            "≥ 0.9, refuted at 0.3",
            "statement",
            "? undecided",
        ],
        ["largest error against quadrature points", "4,096", "", "", ""],
    ]
    body = browser.run("document.querySelector('#T4 .body').innerText")
    for said in ("What T4 states.", "The weights stay.", "agreement to 2·10⁻¹⁵.", "eq. (3)"):
        assert said in body
    assert "ValueError: no" in browser.run("document.getElementById('T30').innerText")
    assert "needs transformers" in browser.run("document.getElementById('T31').innerText")
    assert "recorded verdict is: holds" in browser.run("document.getElementById('T32').innerText")
    pictures = browser.run(
        "[...document.querySelectorAll('#ledger .drawn svg')].map(s => [s.getAttribute('role'),"
        " s.getAttribute('aria-label')])"
    )
    assert pictures[0] == ["img", "G and its gradient."]


def test_figures_keep_their_colors_apart_in_both_themes(browser, page):
    found = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        open_all(browser)
        strokes = browser.run(
            "[...new Set([...document.querySelectorAll('#T1 .drawn path')]"
            ".map(p => getComputedStyle(p).stroke).filter(c => c !== 'none'))]"
        )
        ground = browser.run("getComputedStyle(document.querySelector('#T1 .drawn path')).fill")
        surface = browser.run("getComputedStyle(document.querySelector('.drawn')).backgroundColor")
        assert ground == surface
        assert len(strokes) >= 8
        found.append(set(strokes))
    assert not found[0] & found[1]


def tip(browser: Browser) -> dict[str, str]:
    assert browser.run("!document.getElementById('tip').hidden")
    return dict(
        browser.run(
            "[...document.querySelectorAll('#tip tr')]"
            ".map(r => [...r.cells].map(c => c.textContent))"
        )
    )


def test_the_series_tells_its_numbers(browser, page):
    browser.open(page)
    made = series()
    browser.hover("document.querySelectorAll('#figure-series .slot')[7]")
    assert texts(browser, "#tip b") == [made["dates"][7]]
    shown = tip(browser)
    assert float(shown["mean"].replace("−", "-")) == pytest.approx(made["mean"][7], rel=5e-3)
    assert float(shown["calm"].rstrip("%")) / 100 == pytest.approx(
        made["probabilities"][0][7], rel=5e-3
    )
    browser.run("document.querySelectorAll('#figure-series .slot')[5].focus()")
    browser.press("ArrowLeft", "ArrowLeft")
    assert texts(browser, "#tip b") == [made["dates"][3]]
    assert tip(browser)["observed"] == "missing"
    # The dot of an observation stands where the axis says it does.
    at = browser.run(
        "(s => [...s.querySelectorAll('.seen')].map(c => c.cy.baseVal.value))"
        "(document.querySelector('#figure-series svg'))"
    )
    seen = [x for x in made["observed"] if x is not None]
    assert len(at) == len(seen)
    order = sorted(range(len(at)), key=lambda k: at[k])
    assert order == sorted(range(len(seen)), key=lambda k: -seen[k])


def test_ratios_stand_in_order_on_a_logarithmic_scale(browser, page):
    browser.open(page)
    dots, one = browser.run(
        "(s => [[...s.querySelectorAll('.dot')].map(c => c.cx.baseVal.value),"
        " s.querySelector('.one').x1.baseVal.value])"
        "(document.querySelector('#figure-benchmarks svg'))"
    )
    ratios = torch.tensor([0.25, 1.0, 3.5, 0.0097, 41.7])
    away = torch.tensor(dots) - one
    torch.testing.assert_close(away / away[4], ratios.log() / ratios[4].log(), rtol=1e-3, atol=1e-3)
    assert texts(browser, "#benchmarks > .takeaway") == [
        "In 2 of 5 comparisons the library takes less than the alternative."
    ]
    browser.run("document.querySelector('#figure-benchmarks .mark').focus()")
    browser.press("ArrowDown")
    assert texts(browser, "#tip b") == ["step 1 against plain torch"]
    assert tip(browser)["ratio"] == "1.00"
    open_all(browser)
    cells = texts(browser, "#benchmarks .ratios tbody td")
    assert cells[:6] == ["1 x 64", "step 0", "plain torch", "1 ms", "4 ms", "0.250"]


def test_the_theme_button_recolors_the_canvas(browser, page):
    browser.open(page)
    pixel = (
        "(c => [...c.getContext('2d').getImageData(5, c.height / 2, 1, 1).data])"
        "(document.getElementById('cloud-canvas'))"
    )
    light = browser.run(pixel)
    browser.click("document.getElementById('theme')")
    browser.settle()
    assert browser.run(pixel) != light


def test_print_is_light_and_without_controls(browser, page, tmp_path):
    browser.open(page, dark=True)
    browser.media(dark=True, kind="print")
    browser.settle()
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for hidden in ("nav", "#ledger-controls", "#cloud-panel .controls"):
        assert (
            browser.run(f"getComputedStyle(document.querySelector('{hidden}')).display") == "none"
        )
    keep(browser, tmp_path, "page-print")


def test_claims_are_open_in_print_and_closed_again(browser, page):
    browser.open(page)
    count = "document.querySelectorAll('.entry details[open]').length"
    before = browser.run(count)
    sheets = len(re.findall(rb"/Type\s*/Page\b", browser.pdf()))
    assert browser.run(count) == before
    browser.run("document.querySelectorAll('.entry > details').forEach(d => { d.open = true; })")
    assert len(re.findall(rb"/Type\s*/Page\b", browser.pdf())) == sheets >= 4


@pytest.mark.parametrize("after", ["%", "%E0%A4%A", "nothing", "T4"])
def test_any_address_shows_the_whole_page(browser, page, after):
    browser.open(page)
    browser.errors.clear()
    browser.run(f"history.replaceState(null, '', '#{after}')")
    browser.call("Page.reload")
    browser._until(lambda m: m.get("method") == "Page.loadEventFired", "reloading")
    browser.settle()
    assert browser.run("document.querySelectorAll('#figure-benchmarks svg').length") == 1
    assert browser.errors == []


def nastily(value: Any) -> Any:
    """The same with every text made hostile, but for what is an option of the format."""
    if isinstance(value, str):
        return NASTY
    if isinstance(value, dict):
        kept = ("verdict", "recorded", "form", "outcome", "unit")
        return {k: v if k in kept else nastily(v) for k, v in value.items()}
    return [nastily(v) for v in value] if isinstance(value, list) else value


def test_hostile_texts_are_shown_and_not_run(browser, tmp_path):
    plain = made_parts()
    rows = [nastily(row) | {"id": f"{NASTY}{i}"} for i, row in enumerate(ledger()["claims"])]
    parts = made_parts(
        ledger={"version": NASTY, "seed": 0, "quick": True, "claims": rows},
        figures={rows[0]["id"]: plain.figures["T1"]},
        series=nastily(series()),
        benchmarks=nastily(dict(plain.benchmarks or {})),
        run={NASTY: NASTY},
        notes=[NASTY],
    )
    path = written(parts, tmp_path)
    browser.open(path)
    open_all(browser)
    assert browser.errors == []
    assert browser.run("document.title") == "Cumulant · report"
    assert browser.run("document.scripts.length") == 2
    pictures = "[...document.images].filter(i => !i.closest('#answers')).length"
    assert browser.run(pictures) == 0
    shown = browser.run("document.body.innerText")
    # A formula has a sign for each letter, and the table of ratios repeats the chart.
    assert shown.count(NASTY) > 80
    browser.click("document.querySelector('.chip')")
    assert browser.run("document.querySelectorAll('.entry details')[0].open")
    browser.hover("document.querySelectorAll('#figure-series .slot')[7]")
    assert texts(browser, "#tip b") == [NASTY]
    assert browser.run("document.documentElement.scrollWidth") <= 1280


@pytest.mark.parametrize(
    ("missing", "gone"),
    [
        ({"lens": None}, {"lens"}),
        ({"series": None, "benchmarks": None}, {"series", "benchmarks"}),
        ({"benchmarks": {"machine": "m", "rows": []}, "figures": {}}, {"benchmarks"}),
        ({"run": {}, "notes": []}, {"run"}),
        ({"ledger": {}, "figures": {}}, {"answers", "ledger"}),
        ({"series": series() | {"dates": []}}, {"series"}),
    ],
    ids=["lens", "series", "rows", "run", "ledger", "dates"],
)
def test_a_page_with_missing_parts_makes_sense(browser, tmp_path, missing, gone):
    browser.open(written(made_parts(**missing), tmp_path))
    assert browser.errors == []
    shown = browser.run("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert shown == [s for s in SECTIONS if s not in gone]
    links = browser.run("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert links == shown
    dead = browser.run(
        "[...document.querySelectorAll('a[href^=\"#\"]')].filter(a =>"
        " !document.getElementById(decodeURIComponent(a.hash.slice(1)))).map(a => a.hash)"
    )
    assert dead == []
    assert not browser.run("/NaN|undefined|None/.test(document.body.innerText)")


def test_a_page_of_nothing_but_the_panels(browser, tmp_path):
    browser.open(written(Parts(ledger={}), tmp_path), width=360)
    assert browser.errors == []
    shown = browser.run("[...document.querySelectorAll('main > section')].map(s => s.id)")
    assert shown == ["opening", "query", "cloud"]
    assert browser.run("document.documentElement.scrollWidth") <= 360


def test_every_name_in_the_page_is_one_elements_own(browser, page):
    browser.open(page)
    twice = browser.run(
        "(ids => [...new Set(ids.filter((id, i) => ids.indexOf(id) !== i))])"
        "([...document.querySelectorAll('[id]')].map(e => e.id))"
    )
    assert twice == []
    dangling = browser.run(
        "[...document.querySelectorAll('.drawn use')].map(u => u.getAttribute('href'))"
        ".filter(h => !document.getElementById(h.slice(1)))"
    )
    assert dangling == []


def test_nothing_is_loaded_from_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    # The paper is named by a link, which loads nothing by itself.
    text = text.replace('<a href="https://arxiv.org/abs/2205.01080">', "<a>", 1)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", text)
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[^\s\"'<)]+", text)) <= {"http://www.w3.org/2000/svg"}
    embedded = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert embedded
    assert not set("<>&") & set(embedded[1])
    assert json.loads(embedded[1])["series"]["observed"][3] is None


@pytest.mark.parametrize("package", ["jinja2", "latex2mathml.converter"])
def test_a_missing_package_is_named(monkeypatch, package):
    from cumulant.pages import mathml

    mathml.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=r"pip install '\.\[report\]'"):
        render(Parts(ledger={"claims": [entry("T1", "holds")]}))
