"""What a notebook shows: well-formed, self-contained, small, and without effect on results."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

import cumulant as cm
from cards import HOSTILE, cards, examination
from cumulant.lab import claims
from cumulant.lab.claims import display as claim_display
from cumulant.pages.cards import HUES, Markup, card, facts, table, text
from cumulant.pages.charts import Line, areas, bars, curves, heat, thinned

ELEMENTS = {
    *("div", "style", "p", "b", "span", "dl", "dt", "dd", "table", "thead", "tbody", "tr", "th"),
    *("td", "svg", "path", "text", "rect", "g", "details", "summary", "code", "defs", "use"),
    *("clipPath", "circle", "image", "math"),
}


def checked(page):
    """The page as a tree: it parses, knows only harmless elements, and asks for nothing."""
    root = ElementTree.fromstring(page)
    page.encode("utf-8")
    inside = {x.tag for m in root.iter("math") for x in m.iter()}
    assert {x.tag for x in root.iter()} - inside <= ELEMENTS
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not name.startswith("on")
            assert name not in ("src", "srcset", "action", "background")
            if name == "href":
                assert value.startswith(("#", "data:image/png;"))
            if name in ("style", "fill", "clip-path"):
                assert not re.search(r"url\((?!#)|expression|http", value)
    for style in root.iter("style"):
        assert not re.search(r"@import|url\(|http|</", style.text)
    return root


def words(root):
    return " ".join("".join(root.itertext()).split())


@pytest.fixture(scope="module")
def shown():
    return {name: x._repr_html_() for name, x in cards().items()}


def test_cards_are_well_formed_and_ask_for_nothing(shown):
    for name, page in shown.items():
        root = checked(page)
        assert root.attrib["class"] == "cumulant-card", name
        assert len(page) < 120_000, name
        assert "nan" not in words(root).lower().replace("nanmedian", ""), name


def test_names_from_outside_stay_text(shown):
    for name in ("Examination", "Posterior", "Fit", "Summary"):
        root = checked(shown[name])
        assert '<script>alert(1)</script> & "quoted"' in words(root), name
        assert "<script" not in shown[name]


def test_attended_shows_its_statistics():
    x = torch.zeros(1, 2)
    root = checked(cm.attend(x.expand(6, 2), torch.zeros(8, 2))._repr_html_())
    rows = {r[0].text: [c.text for c in r[1:]] for r in root.iter("tr")}
    assert rows["effective keys"][:3] == ["8", "8", "8"]  # eight equal weights
    assert rows["entropy (nats)"][0] == "2.08"  # log 8
    assert rows["score variance"][:3] == ["0", "0", "0"]
    seen = torch.tensor([[True, True], [False, False]])
    half = cm.attend(torch.zeros(2, 2), torch.zeros(2, 2), attn_mask=seen)
    assert "1 of 2 queries see no key" in words(checked(half._repr_html_()))


def test_the_median_of_an_even_count_lies_between_the_middle_two():
    known = cm.Attended.from_lse(torch.zeros(4, 1), torch.tensor([1.0, 2.0, 4.0, 9.0]))
    rows = {r[0].text: [c.text for c in r[1:]] for r in checked(known._repr_html_()).iter("tr")}
    assert ["1", "3", "9"] in [row[:3] for row in rows.values()]


def test_attended_leaves_other_modes_alone():
    x = torch.randn(5, 3, requires_grad=True)
    a = cm.attend(x, x)
    _ = a._repr_html_()
    assert a._kept
    assert not any(mode.grad for _, mode in a._kept)
    assert not any(mode.grad for _, mode in a._source._kept)
    a.entropy.sum().backward()  # and gradients come as if nobody had looked
    looked, x.grad = x.grad, None
    cm.attend(x, x).entropy.sum().backward()
    assert torch.equal(looked, x.grad)


def test_attended_computes_nothing_that_takes_long_or_waits(monkeypatch):
    monkeypatch.setattr("cumulant.attention.display.PAIRS", 20)
    x = torch.randn(5, 3)
    a = cm.attend(x, x)
    _ = a.mean
    page = words(checked(a._repr_html_()))
    assert "pairs take time" in page
    assert "output E[v]" in page
    assert {name for name, _ in a._kept} == {"mean"}
    b = cm.attend(x[:2], x)
    monkeypatch.setattr(type(b._source), "over_ranks", True)
    assert "all ranks must ask together" in words(checked(b._repr_html_()))
    assert not b._kept


def test_attended_where_there_are_no_values():
    x, seen = torch.randn(2, 4, 3), []

    def look(x):
        seen.append(cm.attend(x, x)._repr_html_())
        return x.sum()

    torch.func.vmap(look)(x)
    torch.func.grad(look)(x)
    seen.append(cm.Attended.from_lse(x.to("meta"), x[..., 0].to("meta"))._repr_html_())
    for page in seen:
        assert "no values here" in words(checked(page))
    with torch.inference_mode():
        assert "entropy (nats)" in words(checked(cm.attend(x, x)._repr_html_()))
    changed = cm.attend(x, x)
    x.add_(1.0)
    assert "changed in place" in words(checked(changed._repr_html_()))
    known = cm.Attended.from_lse(x, x[..., 0])._repr_html_()
    assert "Not known: key_mean" in words(checked(known))


def test_examination_maps_every_head():
    root = checked(examination()._repr_html_())
    maps = [x for x in root.iter("svg") if x.attrib["aria-label"].startswith("map of entropy")]
    cells = sum(p.attrib["d"].count("M") for p in maps[0].iter("path"))
    assert cells == 3 * 5
    repr(examination()).encode("utf-8")  # a kernel sends it
    empty = replace(examination(), tables={}, notes=[])
    assert "Examination" in words(checked(empty._repr_html_()))


def test_modes_and_parameters_of_a_filter(shown):
    said = words(checked(shown["Posterior"]))
    assert "log-likelihood" in said
    assert "■ mode 1 ■ mode 2" in said
    assert "1950" in said
    said = words(checked(shown["Fit"]))
    assert "BIC" in said
    assert "given the whole series" in said  # it had been smoothed


def test_a_batch_shows_its_first_series():
    post = cards_of_a_batch()
    assert "the first of 3 series" in words(checked(post._repr_html_()))
    ahead = cm.filtering.forecast(post, 4)
    assert "predicted" in words(checked(ahead._repr_html_()))


def cards_of_a_batch():
    one = torch.ones(1, 1, 1)
    model = cm.filtering.SwitchingLinearGaussian(
        transition=torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
        initial=torch.tensor([0.5, 0.5]),
        dynamics=one.expand(2, 1, 1),
        dynamics_noise=torch.tensor([0.1, 2.0])[:, None, None],
        emission=one.expand(2, 1, 1),
        emission_noise=one.expand(2, 1, 1),
        initial_mean=torch.zeros(1),
        initial_covariance=torch.eye(1),
    )
    return cm.filtering.filter(model, torch.randn(3, 700, 1))


def test_trajectories_of_every_kind():
    sphere, layer = cm.dynamics.Sphere(), cm.dynamics.LayerNorm()
    runs = [
        cm.dynamics.simulate(torch.randn(9, 1), 3),
        cm.dynamics.simulate(torch.randn(2, 400, 2), 40, contraction=sphere),
        cm.dynamics.simulate(torch.randn(9, 6), 2, contraction=layer),
        cm.dynamics.simulate(torch.eye(3), 0, contraction=sphere),
        cm.dynamics.Trajectory(torch.zeros(0), torch.zeros(0, 4, 2)),
    ]
    for run in runs:
        page = run._repr_html_()
        assert "Trajectory" in words(checked(page))
        assert len(page) < 120_000
    frames = checked(runs[1]._repr_html_()).findall(".//g")
    assert len(frames) == 24
    assert sum("visibility" not in x.attrib for x in frames) == 1  # without styles: the last one


def test_claims_without_packages_for_formulas_and_figures(monkeypatch):
    def absent(*args):
        raise cm.InputError("not installed")

    monkeypatch.setattr(claim_display, "mathml", absent)
    monkeypatch.setattr(claim_display, "as_svg", absent)
    claim = claims.claims()["T1"]
    root = checked(claims.run(claim, quick=True)._repr_html_())
    assert claim.formula in words(root) or root.find(".//code").text == claim.formula
    crashed = replace(claims.Entry(claim, 0, True), crash=HOSTILE)
    assert "Crashed." in words(checked(crashed._repr_html_()))


def test_pieces_take_odd_numbers():
    gaps = [1.0, math.nan, 2.0, math.inf]
    for page in (
        bars([], "none"),
        bars([0.0, 3.0], "x"),
        heat([[math.nan, 1.0], [1.0]], "ragged"),
        heat([], "empty"),
        heat([[float(i * j) for i in range(100)] for j in range(90)], "large"),
        curves([0.0, 1.0, 2.0, 3.0], [Line(gaps)], "gaps"),
        curves([0.0], [Line([5.0])], "a point"),
        curves([], [], "nothing"),
        areas([[0.2, 0.8], [math.nan, math.nan]], "shares"),
        areas([], "no shares"),
        table([], []),
        facts([]),
    ):
        ElementTree.fromstring(card("x", "y", page))
        assert "nan" not in page
        assert "inf" not in page
        assert len(page) < 200_000
    assert thinned(range(1000), 3) == [0, 500, 999]
    assert text(Markup("<b>")) == "<b>"
    assert text("<" * 9999).endswith("…")


@pytest.mark.parametrize("across", [1, 9, 60, 139, 256, 1001])
def test_numbers_beside_a_map_do_not_meet(across):
    page = ElementTree.fromstring(card("x", "y", heat([[0.0] * across] * across, "square")))
    numbers = [x for x in page.iter() if x.tag.rpartition("}")[2] == "text"]
    below = [x for x in numbers if x.get("text-anchor") == "middle"]
    assert below[0].text == "0"
    spans = [(float(x.get("x")), 6.5 * len(x.text)) for x in below]  # digits of 11 pixels
    for (x, wide), (after, next_wide) in pairwise(spans):
        assert x + wide / 2 < after - next_wide / 2
    heights = [float(x.get("y")) for x in numbers if x not in below]
    assert min(heights) >= 8
    assert all(second - first >= 11 for first, second in pairwise(heights))


def test_hues_stand_out_on_light_and_dark():
    def light(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    for hue in HUES:
        assert 1.05 / (light(hue) + 0.05) >= 3  # WCAG 1.4.11, on white
        assert (light(hue) + 0.05) / (light("#1e1e1e") + 0.05) >= 3  # and on a dark notebook


def test_a_card_needs_no_extra(monkeypatch):
    """Cards are plain strings: matplotlib, jinja2 and pandas may be absent."""
    import builtins

    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.split(".")[0] in ("matplotlib", "jinja2", "pandas", "latex2mathml"):
            raise ModuleNotFoundError(name)
        return real(name, *args, **kwargs)

    run = cm.dynamics.simulate(torch.eye(3), 4, contraction=cm.dynamics.Sphere())
    a, post = cm.attend(torch.eye(3), torch.eye(3)), cards_of_a_batch()
    monkeypatch.setattr(builtins, "__import__", refuse)
    for x in (run, a, post):
        checked(x._repr_html_())
