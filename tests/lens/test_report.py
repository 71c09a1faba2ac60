"""The page in a real browser: it draws, answers, asks for nothing, shows what the tables say."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tokenizers
import torch
import transformers
from architectures import build
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

import cumulant as cm
from browser import CONTRAST, Browser, keep, serious
from cumulant.core.errors import InputError
from cumulant.lens.columns import COLUMNS
from cumulant.lens.report import ReportData, render
from report_data import HOSTILE, made_up

CELL = "document.querySelectorAll('#figure-map .cell')"
TOKEN = "document.querySelectorAll('#token-text-box .token')"
FIGURES = ("map", "depth", "classes", "energy", "shape", "sensitivity", "partition", "link")


@pytest.fixture(scope="module")
def data() -> ReportData:
    return made_up()


@pytest.fixture(scope="module")
def page(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(data), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def head(data: ReportData, layer: int, number: int) -> pd.Series:
    table = data.heads
    return table[(table["layer"] == layer) & (table["head"] == number)].iloc[0]


def cells(browser: Browser, rows: str) -> list[list[str]]:
    """The texts of a table's cells, row by row."""
    return browser.run(
        f"[...document.querySelectorAll('{rows}')].map(r => [...r.cells].map(c => c.textContent))"
    )


def tip(browser: Browser) -> dict[str, str]:
    assert browser.run("!document.getElementById('tip').hidden")
    return dict(cells(browser, "#tip tr"))


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("dark", [False, True])
def test_draws_everything_and_asks_for_nothing(browser, page, tmp_path, width, dark):
    browser.open(page, width=width, dark=dark)
    assert browser.errors == []
    assert [u for u in browser.requests if not u.startswith("data:")] == [page.as_uri()]
    for name in FIGURES:
        marks = browser.run(
            f"[...document.querySelectorAll('#figure-{name} svg')].map(s => "
            "s.querySelectorAll('rect, circle, .dot').length)"
        )
        assert marks, name
        assert min(marks) > 0, name
    assert browser.run("document.querySelectorAll('figure').length") == len(FIGURES)
    assert browser.run("document.documentElement.scrollWidth") <= width
    keep(browser, tmp_path, f"report-{width}-{'dark' if dark else 'light'}")


@pytest.mark.parametrize(("width", "dark"), [(380, False), (800, True), (1280, False)])
def test_axe_finds_nothing_serious(browser, page, width, dark):
    browser.open(page, width=width, dark=dark)
    browser.run("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    browser.settle()
    assert serious(browser) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("statistic", ["entropy", "class", "symmetry", "sink_mass"])
def test_text_is_readable(browser, page, dark, statistic):
    browser.open(page, dark=dark)
    browser.choose("map-statistic", statistic)
    *poor, (checked, _, _) = browser.run(CONTRAST)
    assert checked > 300
    assert poor == []


def test_the_theme_button_switches_and_switches_back(browser, page):
    browser.open(page)
    color = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(color)
    browser.click("document.getElementById('theme')")
    assert browser.run("document.getElementById('theme').getAttribute('aria-pressed')") == "true"
    dark = browser.run(color)
    assert dark != light
    *poor, _ = browser.run(CONTRAST)
    assert poor == []
    browser.click("document.getElementById('theme')")
    assert browser.run(color) == light


def test_pointing_at_a_head_tells_its_numbers(browser, page, data, tmp_path):
    browser.open(page)
    browser.hover(f"{CELL}[{2 * 12 + 7}]")
    shown, row = tip(browser), head(data, 2, 7)
    assert browser.run("document.querySelector('#tip b').textContent") == "Layer 2, head 7"
    assert float(shown["Entropy (nats)"]) == pytest.approx(row["entropy"], rel=5e-3)
    assert float(shown["Mass on the sink"].rstrip("%")) / 100 == pytest.approx(
        row["sink_mass"], rel=5e-3
    )
    assert float(shown["Energy change"].replace("−", "-")) == pytest.approx(
        row["energy_change"], rel=5e-3
    )
    assert shown["Class I–IV"] == row["class"]
    keep(browser, tmp_path, "report-tip", whole=False)
    browser.press("Escape")
    assert browser.run("document.getElementById('tip').hidden")


def test_on_a_phone_a_head_tells_the_statistic_on_display_and_little_more(browser, page, data):
    browser.open(page, width=380, height=760)
    browser.choose("map-statistic", "sink_mass")
    browser.hover(f"{CELL}[{2 * 12 + 7}]")
    shown = cells(browser, "#tip tr")
    assert shown[0][0] == "Mass on the sink"
    assert float(shown[0][1].rstrip("%")) / 100 == pytest.approx(
        head(data, 2, 7)["sink_mass"], rel=5e-3
    )
    assert len(shown) == 9
    assert shown[-1][0].endswith("more in a wider window")
    assert browser.run("document.getElementById('tip').offsetHeight") < 200


def test_arrows_move_in_the_map_and_enter_chooses(browser, page, data):
    browser.open(page)
    browser.run("document.getElementById('map-statistic').focus()")
    browser.press("Tab")
    assert "Layer 0, head 0" in browser.run("document.activeElement.getAttribute('aria-label')")
    browser.press("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft")
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith(
        "Layer 1, head 1."
    )
    assert float(tip(browser)["Entropy (nats)"]) == pytest.approx(
        head(data, 1, 1)["entropy"], rel=5e-3
    )
    ring = browser.run("getComputedStyle(document.activeElement.firstElementChild).strokeWidth")
    assert float(ring.rstrip("px")) >= 3
    browser.press("ArrowUp", "ArrowUp", "ArrowLeft", "ArrowLeft")  # the edges hold
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith(
        "Layer 0, head 0."
    )
    browser.press("ArrowDown", "ArrowRight", "Enter")
    for menu in ("token-layer", "token-head"):
        assert browser.run(f"document.getElementById('{menu}').value") == "1"
    # One tab stop for the whole map.
    assert browser.run(f"[...{CELL}].filter(c => c.tabIndex === 0).length") == 1


def test_a_finding_leads_to_its_statistic_and_its_head(browser, page, data):
    browser.open(page)
    best = data.heads.loc[data.heads["sink_mass"].idxmax()]
    # Not by its middle, which is beside it where it runs over two lines.
    browser.run("document.querySelector('.findings a[data-statistic=sink_mass]').click()")
    browser.settle()
    values = browser.run(
        "['map-statistic', 'token-layer', 'token-head'].map(n => document.getElementById(n).value)"
    )
    assert values == ["sink_mass", str(int(best["layer"])), str(int(best["head"]))]
    assert browser.run("location.hash") == "#maps"
    pressed = browser.run(
        "[...document.querySelectorAll('[data-plot=map] [aria-pressed=true]')]"
        ".map(e => e.getAttribute('aria-label'))"
    )
    assert len(pressed) == 1
    assert pressed[0].startswith(f"Layer {int(best['layer'])}, head {int(best['head'])}.")


def test_tokens_tell_their_statistics_and_light_up_their_keys(browser, page, data, tmp_path):
    browser.open(page)
    browser.click(f"{CELL}[{3 * 12 + 9}]")
    browser.hover(f"{TOKEN}[77]")
    table = data.tokens
    row = table[(table["layer"] == 3) & (table["head"] == 9) & (table["token"] == 77)].iloc[0]
    shown = dict(cells(browser, "#token-detail tr"))
    assert float(shown["Entropy (nats)"]) == pytest.approx(row["entropy"], rel=5e-3)
    assert float(shown["Keys holding 90%"]) == row["k90"]
    assert float(shown["Visible keys"]) == 78
    lit = browser.run(
        f"[...{TOKEN}].map((t, i) => t.classList.contains('key') ? i : -1).filter(i => i >= 0)"
    )
    expected = data.top[0][3][9][77]
    assert sorted(lit) == sorted(key for key, _ in expected)
    weights = browser.run(
        "[...document.querySelectorAll('.weights li')].map(e => e.children[1].textContent)"
    )
    assert [float(w.rstrip("%")) / 100 for w in weights] == pytest.approx(
        [w for _, w in expected], rel=6e-3
    )
    strongest = browser.run(f"+{TOKEN}[{expected[0][0]}].style.getPropertyValue('--w')")
    weakest = browser.run(f"+{TOKEN}[{expected[-1][0]}].style.getPropertyValue('--w')")
    assert strongest > weakest
    keep(browser, tmp_path, "report-tokens", whole=False)


def test_arrows_move_in_the_text(browser, page):
    browser.open(page)
    browser.run(f"{TOKEN}[0].focus()")
    here = "document.activeElement.getAttribute('aria-label')"
    browser.press("ArrowRight", "ArrowRight")
    assert ", token 2," in browser.run(here)
    browser.press("ArrowLeft")
    assert ", token 1," in browser.run(here)
    top = browser.run("document.activeElement.getBoundingClientRect().top")
    browser.press("ArrowDown")
    assert browser.run("document.activeElement.getBoundingClientRect().top") > top + 10
    browser.press("ArrowUp", "End")
    assert ", token 129," in browser.run(here)
    # Redrawing the text must not leave the old listeners behind.
    browser.choose("token-statistic", "sink_mass")
    browser.run(f"{TOKEN}[0].focus()")
    browser.press("ArrowRight")
    assert ", token 1, Mass on the sink" in browser.run(here)


def test_points_of_the_lines_tell_their_medians(browser, page, data):
    browser.open(page)
    browser.hover("document.querySelectorAll('#figure-depth svg')[0].querySelectorAll('.mark')[4]")
    table = data.expansions
    mine = table[(table["sublayer"] == "attention") & (table["layer"] == 4)].set_index("tokens")
    assert float(tip(browser)["median ratio"]) == pytest.approx(mine.loc["all", "median"], rel=5e-3)
    browser.click("document.getElementById('without-sinks')")
    browser.hover("document.querySelectorAll('#figure-depth svg')[0].querySelectorAll('.mark')[4]")
    assert float(tip(browser)["median ratio"]) == pytest.approx(
        mine.loc["without_sinks", "median"], rel=5e-3
    )
    # By radius, at each the vectors as they are first.
    for place, kind in ((4, "embeddings as they are"), (5, "about their mean")):
        browser.run("document.activeElement.blur()")
        mark = "document.querySelectorAll('#figure-partition svg')[1].querySelectorAll('.mark')"
        browser.run(f"[...{mark}].sort((a, b) => a.dataset.mark - b.dataset.mark)[{place}].focus()")
        assert browser.run("document.querySelector('#tip b').textContent") == f"Radius 1, {kind}"
        spread = float(tip(browser)["relative sd of Z"].rstrip("%")) / 100
        assert spread == pytest.approx(data.partition["relative_sd"].iloc[place], rel=5e-3)


def test_the_partition_function_has_a_line_for_each_kind(browser, page, data):
    browser.open(page)
    for panel in (0, 1):
        curves = browser.run(
            f"[...document.querySelectorAll('#figure-partition svg')[{panel}]"
            ".querySelectorAll('.curve')].map(c => c.getAttribute('d').match(/[\\d.]+(?=,)/g))"
        )
        assert len(curves) == 2
        for across in curves:  # one point for each radius, from left to right
            places = [float(x) for x in across]
            assert len(places) == data.partition["radius"].nunique()
            assert places == sorted(places)
    keys = browser.run(
        "[...document.querySelectorAll('#figure-partition .key-item')].map(k => k.textContent)"
    )
    assert keys == ["embeddings as they are", "about their mean"] * 2
    browser.run("[...document.querySelectorAll('#figure-partition .mark')].at(-1).focus()")
    assert data.partition["relative_sd"].max() > 2
    assert tip(browser)["relative sd of Z"].startswith("×")


def axis_labels(browser: Browser, panel: int) -> list[float]:
    texts = browser.run(
        f"[...document.querySelectorAll('#figure-depth svg')[{panel}]"
        ".querySelectorAll('text[text-anchor=end]')].map(t => t.textContent)"
    )
    return [float(t) for t in texts]


def test_depth_panels_resolve_small_ratios_and_label_large_ones(browser, data, tmp_path):
    table = data.expansions.copy()
    quantiles = ["q05", "q25", "median", "q75", "q95"]
    small, wide = table["sublayer"] == "attention", table["sublayer"] == "norm"
    table.loc[small, quantiles] = [1.03, 1.05, 1.07, 1.09, 1.14]
    table.loc[wide, quantiles] = [0.03, 0.1, 0.8, 1.5, 12]
    path = tmp_path / "depth.html"
    path.write_text(render(dataclasses.replace(data, expansions=table)), encoding="utf-8")
    browser.open(path)
    titles = "[...document.querySelectorAll('#figure-depth h3')].map(h => h.textContent)"
    assert browser.run(titles) == ["Attention", "Feed-forward", "Normalization", "Whole block"]
    assert {1, 1.1} <= set(axis_labels(browser, 0))
    assert axis_labels(browser, 2) == [0.03, 0.1, 0.3, 1, 3, 10]
    dot, one = browser.run(
        "['.dot', '.one'].map(mark => document.querySelector(`#figure-depth ${mark}`)"
        ".getBoundingClientRect()).map(b => b.y + b.height / 2)"
    )
    assert one - dot > 25  # 1.07 stands well clear of the line at 1
    browser.click("document.getElementById('same-scale')")
    for panel in range(4):
        assert axis_labels(browser, panel) == [0.03, 0.1, 0.3, 1, 3, 10]


def test_the_map_says_what_it_shows(browser, page):
    browser.open(page)
    meaning = "document.getElementById('map-meaning').textContent"
    assert browser.run(meaning) == "Entropy (nats): Hi = −Σj pij log pij = Gi − Ei[score + bias]."
    assert browser.run("document.querySelectorAll('#map-meaning sub').length") == 6
    browser.choose("map-statistic", "sink_mass")
    assert COLUMNS["sink_mass"].definition in browser.run(meaning)


def test_definitions_are_those_of_the_columns_shown_by_table(browser, page, data):
    browser.open(page)
    groups = browser.run(
        "(first => [...document.querySelectorAll('#definitions dl')].map(d =>"
        " [first(d.previousElementSibling), [...d.querySelectorAll('dt')].map(first)]))"
        "(node => node.firstChild.textContent.trim())"
    )
    names = ("tokens", "heads", "layers", "expansions", "partition")
    assert [table for table, _ in groups] == [n.capitalize() for n in names]
    said: set[str] = set()
    for name, (_, columns) in zip(names, groups, strict=True):
        table = getattr(data, name)
        held = {c for c in table.columns if table[c].notna().any()} & set(COLUMNS)
        assert set(columns) == held - said
        said |= held
    assert "cross_attention_expansion" not in said  # a column without a number
    assert {"centered", "norm", "radius"} <= said


def test_stacked_bars_add_up(browser, page, data):
    browser.open(page)
    for row in cells(browser, "#figure-classes tbody tr"):
        layer, *counts = map(int, row)
        classes = data.heads[data.heads["layer"] == layer]["class"]
        assert counts == [int((classes == c).sum()) for c in ("I", "II", "III", "IV")]


def test_hostile_tokens_are_shown_and_not_run(browser, data, tmp_path):
    nasty = "<script>document.title='run'</script>"
    hostile = dataclasses.replace(
        data,
        title=f"model {nasty}",
        notes=[nasty],
        facts={nasty: nasty},
        run={nasty: "</script>"},
        texts=[(nasty, data.texts[0].tokens)],
    )
    path = tmp_path / "hostile.html"
    path.write_text(render(hostile), encoding="utf-8")
    browser.open(path)
    assert browser.errors == []
    assert browser.run("document.title") == f"model {nasty} · attention report"
    shown = browser.run(f"[...{TOKEN}].slice(1, 4).map(t => t.textContent)")
    assert shown == HOSTILE
    assert browser.run("document.scripts.length") == 2
    assert browser.run("document.images.length") == 0


def test_print_is_light_whole_and_without_controls(browser, page, tmp_path):
    browser.open(page, dark=True)
    browser.media(dark=True, kind="print")
    browser.settle()
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    keep(browser, tmp_path, "report-print")
    printed = browser.pdf()
    assert printed.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) >= 3


def test_wide_models_scroll_in_their_own_box(browser, tmp_path):
    path = tmp_path / "wide.html"
    path.write_text(render(made_up(layers=2, heads=40, tokens=20)), encoding="utf-8")
    browser.open(path, width=360)
    assert browser.errors == []
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run("(b => b.scrollWidth > b.clientWidth)(document.querySelector('.scroll'))")


def test_charts_follow_the_window(browser, page):
    browser.open(page)
    browser.viewport(420, 800)
    browser.settle()
    browser.settle()
    widths = browser.run(
        "[...document.querySelectorAll('.panel svg')].map(s => s.getBoundingClientRect().width)"
    )
    assert max(widths) <= 420
    assert browser.run("document.documentElement.scrollWidth") <= 420


def test_sections_without_data_are_left_out(browser, data, tmp_path):
    bare = data.heads[["layer", "head", "entropy"]]
    path = tmp_path / "bare.html"
    path.write_text(render(ReportData("bare", heads=bare)), encoding="utf-8")
    browser.open(path)
    assert browser.errors == []
    assert browser.run("[...document.querySelectorAll('section')].map(s => s.id)") == [
        "overview",
        "maps",
        "definitions",
    ]
    path.write_text(render(ReportData("empty")), encoding="utf-8")
    browser.open(path)
    assert browser.errors == []
    assert browser.run("document.querySelectorAll('figure').length") == 0


def test_encoder_decoder_shows_queries_and_keys_apart(browser, data, tmp_path):
    tokens = data.tokens[(data.tokens["layer"] < 2) & (data.tokens["token"] < 9)].copy()
    tokens.loc[tokens["layer"] == 1, "attention"] = "cross"
    heads = data.heads[data.heads["layer"] < 2].copy()
    heads.loc[heads["layer"] == 1, "attention"] = "cross"
    source, target = [f"s{i}" for i in range(20)], [f"t{i}" for i in range(9)]
    both = dataclasses.replace(data, tokens=tokens, heads=heads, texts=[("pair", source, target)])
    path = tmp_path / "pair.html"
    path.write_text(render(both), encoding="utf-8")
    browser.open(path)
    browser.click(f"{CELL}[12]")
    assert browser.errors == []
    assert browser.run(f"[...{TOKEN}].map(t => t.textContent)") == target
    keys = "document.querySelectorAll('#token-keys-box .token')"
    assert browser.run(f"[...{keys}].map(t => t.textContent)") == source
    browser.hover(f"{TOKEN}[5]")
    lit = browser.run(
        f"[...{keys}].map((t, i) => t.classList.contains('key') ? i : -1).filter(i => i >= 0)"
    )
    assert sorted(lit) == sorted(k for k, _ in data.top[0][1][0][5])


def word_tokenizer(words: list[str]) -> transformers.PreTrainedTokenizerFast:
    core = tokenizers.Tokenizer(WordLevel({w: k for k, w in enumerate(words)}, unk_token=words[1]))
    core.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=words[0], unk_token=words[1]
    )


def test_an_encoder_decoder_is_examined_and_shown(browser, tmp_path):
    model, words = build("t5", dtype=torch.float32), ["one", "two", "three", "four", "five", "six"]
    tokenizer = word_tokenizer(["<pad>", "<unk>", *words])
    read: list[torch.Tensor] = []
    hook = model.decoder.register_forward_pre_hook(
        lambda _, __, given: read.append(given["input_ids"]), with_kwargs=True
    )
    try:
        found = cm.lens.examine(model, tokenizer, " ".join(words))
    finally:
        hook.remove()
    ((_, source, target),) = found.shown
    assert source == words
    assert target[0] == "<start>"
    assert target[1:] == tokenizer.convert_ids_to_tokens(read[0][0, 1:].tolist())
    path = found.report(tmp_path / "t5.html")
    browser.open(path)
    assert browser.errors == []
    labels = browser.run(
        "[...document.querySelectorAll('#token-layer option')].map(o => o.textContent)"
    )
    assert labels == ["encoder 0", "encoder 1", "decoder 2", "cross 3", "decoder 4", "cross 5"]
    keys = "document.querySelectorAll('#token-keys-box .token')"
    for layer, queries, others in ((1, source, []), (2, target, []), (3, target, source)):
        browser.choose("token-layer", str(layer))
        assert browser.run(f"[...{TOKEN}].map(t => t.textContent)") == queries
        assert browser.run(f"[...{keys}].map(t => t.textContent)") == others
    # A line ends with the encoder; the decoder's begins anew.
    curves = "document.querySelector('#figure-depth svg').querySelectorAll('.curve').length"
    assert browser.run(curves) == 2
    keep(browser, tmp_path, "report-encoder-decoder")


def test_a_sink_logit_stands_before_the_text(browser, tmp_path):
    few = made_up(layers=1, heads=2, tokens=6)
    top = [[[[(-1, 0.7), (0, 0.3)]] * 6] * 2]  # of one layer
    path = tmp_path / "sink.html"
    path.write_text(render(dataclasses.replace(few, top=[top])), encoding="utf-8")
    browser.open(path)
    browser.hover("document.querySelectorAll('#token-text-box [role=option]')[5]")
    assert browser.errors == []
    lit = browser.run("[...document.querySelectorAll('.token.key')].map(t => t.textContent)")
    assert lit == ["sink logit", "[CLS]"]
    assert browser.run("document.querySelector('.weights li').textContent") == "sink logit 70%"
    current = browser.run("document.querySelector('.token.current').textContent")
    assert current == few.texts[0].tokens[5].removeprefix("##")


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 8), (8, 1), (32, 32)])
def test_models_of_every_shape(browser, tmp_path, layers, heads):
    path = tmp_path / "shape.html"
    path.write_text(render(made_up(layers=layers, heads=heads, tokens=8)), encoding="utf-8")
    browser.open(path)
    assert browser.errors == []
    assert browser.run(f"{CELL}.length") == layers * heads
    low, high = browser.run(
        f"[...{CELL}].map(c => c.getBoundingClientRect().width).reduce(([a, b], w) =>"
        " [Math.min(a, w), Math.max(b, w)], [Infinity, 0])"
    )
    assert low >= 18
    assert high <= 80
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    assert not browser.run("/NaN|Infinity|undefined/.test(document.body.innerText)")
    keep(browser, tmp_path, f"report-{layers}x{heads}")


def test_on_a_phone_the_panel_stays_in_view_and_off_the_token(browser, page, tmp_path):
    browser.open(page, width=380, height=740)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=1)
    try:
        # The first at the lower edge of the screen, where the panel is about to appear.
        for token, edge in ((3, "end"), (60, "center"), (100, "center")):
            browser.run(f"{TOKEN}[{token}].scrollIntoView({{block: '{edge}'}})")
            browser.settle()
            box = f"{TOKEN}[{token}].getBoundingClientRect()"
            x, y = browser.run(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
            browser.call(
                "Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}]
            )
            browser.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
            browser.run(
                "new Promise((done, fail) => { setTimeout(fail, 5000); const look = () =>"
                f" {TOKEN}[{token}].matches('.current') ? done() : requestAnimationFrame(look);"
                " look(); })"
            )
            browser.settle()
            panel = "document.getElementById('token-detail').getBoundingClientRect()"
            bottom, top, foot = browser.run(f"[{box}.bottom, {panel}.top, {panel}.bottom]")
            assert bottom <= top
            assert top < foot <= 740
        keep(browser, tmp_path, "report-phone-token", whole=False)
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


def embedded_json(page: str) -> str:
    return re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1)


def test_the_file_is_small_and_its_data_strict(data):
    page = render(data)
    assert len(page.encode()) < 3_000_000
    text = embedded_json(page)
    assert not set("<>&") & set(text)
    assert text.isascii()

    def refuse(name):
        raise AssertionError(f"{name} in the JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read["texts"][0]["tokens"] == data.texts[0].tokens
    entropy = np.array(read["texts"][0]["calls"]["4"]["statistics"]["entropy"])
    table = data.tokens[data.tokens["layer"] == 4].pivot(
        index="head", columns="token", values="entropy"
    )
    np.testing.assert_allclose(entropy, table.to_numpy(), rtol=1e-3, atol=1e-12)


def test_nothing_is_loaded_from_elsewhere(data):
    page = render(data)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#|data:)""", page)
    assert "default-src 'none'" in page
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}


def test_absent_numbers_are_absent(data):
    heads = data.heads.copy()
    heads.loc[3, ["entropy", "lipschitz"]] = [np.nan, np.inf]
    read = json.loads(embedded_json(render(dataclasses.replace(data, heads=heads))))
    assert read["heads"]["entropy"][3] is None
    assert read["heads"]["lipschitz"][3] is None


def test_long_texts_are_cut_with_a_note(data):
    long = made_up(layers=1, heads=1, tokens=600)
    page = render(long)
    assert "The token view shows the first 512 tokens of passage." in page
    assert len(json.loads(embedded_json(page))["texts"][0]["tokens"]) == 512
    every = pd.concat([long.tokens.assign(input=i) for i in range(5)])
    many = dataclasses.replace(long, tokens=every, texts=[long.texts[0]] * 5, top=long.top * 5)
    assert "The token view shows 3 of 5 texts." in render(many)
    # A text that was never examined is not shown; the others keep their own rows.
    some = dataclasses.replace(many, tokens=every[every["input"] > 0].assign(entropy=1.5))
    names = ["never", "one", "two", "three", "four"]
    some = dataclasses.replace(some, texts=[(n, long.texts[0].tokens) for n in names])
    shown = json.loads(embedded_json(render(some)))["texts"]
    assert [t["name"] for t in shown] == ["one", "two", "three"]


def test_text_that_cannot_be_encoded_does_not_break_the_page(data):
    odd = dataclasses.replace(data, title="name\udcff", texts=[("t\udcff", ["a\udcff"] * 130)])
    assert render(odd).encode("utf-8")


def test_a_missing_jinja2_is_named(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(InputError, match=r"pip install '\.\[report\]'"):
        render(data)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": {"energy_change": 0.0, "link_linear": None}},
        {"tokens": {"entropy": None, "effective_keys": 0.0}},
        {"tokens": {"attention": "cross"}},
        {"expansions": {"q95": np.inf}, "partition": {"relative_sd": np.inf}},
        {"layers": {"attention_expansion": np.inf, "anisotropy": None}},
    ],
    ids=lambda c: "-".join(c),
)
def test_odd_tables_leave_no_broken_marks(browser, tmp_path, change):
    plain = made_up(layers=2, heads=2, tokens=5)
    changed = {t: getattr(plain, t).assign(**columns) for t, columns in change.items()}
    path = tmp_path / "odd.html"
    path.write_text(render(dataclasses.replace(plain, **changed)), encoding="utf-8")
    browser.open(path)
    browser.hover(f"{TOKEN}[2]")
    assert browser.errors == []
    attributes = browser.run(
        "[...document.querySelectorAll('svg *')].flatMap(e => [...e.attributes].map(a => a.value))"
    )
    assert not [a for a in attributes if re.search("NaN|Infinity|undefined", a)]
    assert not browser.run("/NaN|Infinity|undefined/.test(document.body.innerText)")
