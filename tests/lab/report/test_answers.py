"""The first screen says what docs/answers.md says; cards lead to the files they name."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from made_parts import entry, ledger, made_parts

from cumulant.lab.claims import claims
from cumulant.lab.claims.ledger import experiment_file
from cumulant.lab.report import documents, render
from cumulant.lab.report.answers import answers
from cumulant.lab.report.documents import Links, derivations
from cumulant.pages.markdown import markdown

ROOT = Path(__file__).parents[3]
SOURCE = (ROOT / "docs" / "answers.md").read_text()


def words(text: str) -> str:
    """Letters and digits alone: markup, formulas and lines are not compared."""
    plain = unescape(re.sub(r"<[^>]+>|\$[^$]*\$|\]\([^)]*\)", "", text))
    return "".join(re.findall(r"[^\W_]", plain))


def test_every_question_of_the_page_with_its_answer_figure_and_claims():
    found = answers(Links(claims()))
    questions = re.findall(r"^## (.+)$", SOURCE, re.MULTILINE)
    assert [a.question for a in found] == questions
    assert len(questions) >= 7
    for a in found:
        body = SOURCE.split(f"## {a.question}\n")[1].split("\n## ")[0]
        plain = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", body)
        shown = re.sub(r"<math.*?</math>", "", a.short + a.evidence)
        assert words(shown) == words(plain), a.question
        assert bool(a.figure) == ("![" in body), a.question
        assert 'href="#' in a.short + a.evidence, a.question


def test_every_question_is_answered_in_two_sentences():
    for section in SOURCE.split("\n## ")[1:]:
        question, _, body = section.partition("\n")
        if "![" in body:
            answer = body.split("![")[0]
            assert 1 <= len(re.findall(r"[.!?](?=\s)", answer)) <= 2, question


def test_the_head_of_the_page_answers_every_question_in_a_few_words():
    head = render(made_parts()).partition("</header>")[0]
    found = re.findall(r'<li><a href="#(h-answer-\d+)">([^<]+)</a> <b>([^<]+)</b>', head)
    illustrated = [x for x in SOURCE.split("\n## ")[1:] if "![" in x]
    assert [question for _, question, _ in found] == [x.partition("\n")[0] for x in illustrated]
    for (anchor, _, verdict), section in zip(found, illustrated, strict=True):
        assert section.partition("\n")[2].strip().startswith(verdict.rstrip("."))
        assert f'id="{anchor}"' in render(made_parts())


def test_systems_and_studies_have_theory_file_and_command():
    for name, claim in claims().items():
        section = claim.theory or name
        assert section in derivations(), name
        assert (ROOT / experiment_file(claim)).is_file(), name
    study = claims()["which-weights"]
    assert experiment_file(study).endswith("studies/files/which-weights.toml")
    assert study.again == "cumulant study which-weights -o which-weights"


def test_what_is_written_there_is_shown_here(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "answers.md").write_text(
        "# Answers\n\n## Why *so*?\n\nBecause: $x_1 < y$ & <b>W_q</b>.\n\nClaim [T4](theory.md#t4),"
        " [gone](theory.md#t99), [elsewhere](other.md).\n"
    )
    monkeypatch.setattr(documents, "CHECKOUT", tmp_path)
    page = render(made_parts())
    assert "Why *so*?" in page
    assert "<strong>Because:</strong>" in page
    assert "&lt;b&gt;W<sub>q</sub>&lt;/b&gt;" in page
    assert '<a href="#T4">T4</a>, gone, elsewhere.' in page


def test_without_the_documentation_the_page_does_without(monkeypatch, tmp_path):
    monkeypatch.setattr(documents, "CHECKOUT", tmp_path)
    monkeypatch.setattr(documents, "COPY", tmp_path)
    assert 'id="answers"' not in render(made_parts())


def test_cards_lead_to_experiment_theory_and_law(tmp_path):
    row = entry("T14", "holds", experiment="src/cumulant/lab/claims/theory/t14.py")
    parts = made_parts(ledger=ledger() | {"claims": [row]})
    inside = ROOT / "cumulant-report"
    page = render(parts, inside)
    found = re.findall(r'<dd>\s*<a href="([^"]+)"><code>', page)
    assert found == [
        "../docs/theory.md#t14",
        "../src/cumulant/lab/claims/theory/t14.py",
        "../tests/laws/test_duality.py",
    ]
    for address in found:
        assert (inside / address.partition("#")[0]).resolve().is_file()
    assert "cumulant claims --only T14" in page
    # Without a place there are no addresses, but the names stay.
    assert "<code>src/cumulant/lab/claims/theory/t14.py</code>" in render(parts)
    assert 'href="../' not in render(parts)


def test_every_statement_has_a_derivation_that_is_typeset():
    found = derivations()
    numbered = [name for name in claims() if re.fullmatch(r"T\d+[a-z]?", name)]
    assert set(numbered) <= set(found)
    for name, text in found.items():
        made = markdown(text, Links(claims()))
        plain = re.sub(r"<code>.*?</code>", "", made, flags=re.DOTALL)
        assert "$" not in plain, name
        assert "\\" not in plain, name
        assert "Law:" not in plain, name


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a `$x$` b", "<p>a <code>$x$</code> b</p>\n"),
        ("W_q, e^G, β^((d-1)/2)", "W<sub>q</sub>, e<sup>G</sup>, β<sup>(d−1)/2</sup>"),
        ("| a | b |\n|---|---|\n| $x$ | 2 |", "<td><math"),
        ("![p](x.png) <img src=x>", "&lt;img src=x&gt;"),
        ("[x](javascript:run)", "[x](javascript:run)"),
    ],
)
def test_markdown(text, html):
    made = markdown(text)
    assert html in made
    assert "<img" not in made
