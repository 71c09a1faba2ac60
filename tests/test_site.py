"""The documentation as a site: it builds without a warning, hangs together, needs no network."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest

import cumulant as cm
from browser import Browser
from cumulant.lab.claims import claims

ROOT = Path(__file__).parents[1]
REMOTE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)


class Page(HTMLParser):
    """What a page names, links to and loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.entries: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text = path.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids[given["id"]] += 1
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link":
            self.loads.append(given["href"])
        self.loads += [given[name] for name in ("src", "srcset", "poster", "data") if name in given]
        classes = given.get("class", "").split()
        if tag == "dt" and "sig-object" in classes and "id" in given:
            self.entries.append(given["id"])
        elif given.get("id", "").startswith("module-"):
            self.entries.append(given["id"].removeprefix("module-"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; a build with warnings ends here."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    built = subprocess.run(
        [*command, "-d", str(tmp_path_factory.mktemp("doctrees")), "docs", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return out


@pytest.fixture(scope="module")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_of_the_documentation_is_there(site, pages):
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.rst")]
    for source in sources:
        built = site / source.relative_to(ROOT / "docs").with_suffix(".html")
        assert built in pages
        assert pages[built].tags["h1"] == 1, source


def test_links_and_anchors_resolve(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchors = {"", "top", *pages[target].ids} if target in pages else {""}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                broken.append(f"{path.relative_to(site)}: {link}")
    assert broken == []


def test_ids_are_unique(pages):
    for path, page in pages.items():
        assert [name for name, count in page.ids.items() if count > 1] == [], path


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        for load in page.loads:
            assert not REMOTE.match(load), f"{path.name} loads {load}"
            if not load.startswith(("data:", "#")):
                local = path.parent / unquote(urlsplit(load).path)
                assert local.is_file(), f"{path.name} loads {load}"
    for style in site.rglob("*.css"):
        for load in re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')]+)", style.read_text()):
            assert not REMOTE.match(load), f"{style.name} loads {load}"


def test_mathematics_is_mathml(pages):
    """Formulas are typeset by the browser: none is left as TeX, none waits for a script."""
    found = Counter({path.stem: page.tags["math"] for path, page in pages.items()})
    assert found["theory"] >= 150
    assert found["tutorial"] >= 10
    for page in pages.values():
        assert not re.search(r"\$\$|\\(langle|nabla|eta|frac)\b", page.text)
        assert not any("mathjax" in load.lower() for load in page.loads)


def test_every_public_name_is_documented_once(pages):
    entries = [name for page in pages.values() for name in page.entries]
    documented = Counter(id(find(name)) for name in entries)
    namespaces = [cm, cm.attention, cm.measures]
    namespaces += [x for x in map(cm.__getattribute__, modules_of(cm)) if x not in namespaces]
    assert len(namespaces) >= 10
    for namespace in namespaces:
        for name in namespace.__all__:
            count = documented[id(getattr(namespace, name))]
            assert count == 1, f"{namespace.__name__}.{name} is documented {count} times"


def modules_of(package):
    return [name for name in package.__all__ if isinstance(getattr(package, name), ModuleType)]


def find(name):
    """The object of that dotted name."""
    first, *rest = name.split(".")
    assert first == "cumulant"
    found, path = cm, first
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else import_module(path)
    return found


def test_theory_has_every_statement_with_its_test_and_its_claim(pages):
    """Anchors are the numbers, in the source and in the page; the files named exist."""
    text = (ROOT / "docs" / "theory.md").read_text()
    parts = re.split(r"^## (T\d+[a-z]?)\. .+$", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    six = re.findall(r"Claim `(\w+)`", sections.pop("T42"))  # T42 is six systems, by name
    assert len(six) == 6
    assert set(six) <= set(claims())
    studies = re.findall(r"`([a-z-]+)`", sections.pop("T36").split("recorded studies")[-1])
    assert studies  # T36 is decided by studies, which are claims by their names
    assert set(studies) <= set(claims())
    assert list(sections) == [name for name in claims() if re.fullmatch(r"T\d+[a-z]?", name)]
    (page,) = (page for path, page in pages.items() if path.name == "theory.html")
    for number, section in sections.items():
        assert number.lower() in page.ids
        assert f"Claim: [{number}](claims/ledger.md#{number.lower()})" in " ".join(section.split())
        law = section[section.rindex("Law: ") :]
        files = re.findall(r"`(tests/[^`]+)`", law)
        assert files, number
        assert all((ROOT / name).is_file() for name in files), number


@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_a_phone_and_ask_nothing(site, dark):
    with Browser() as browser:
        for name in ("index", "theory", "api/measures", "benchmarks/calculus"):
            browser.open(site / f"{name}.html", width=380, dark=dark)
            assert browser.run("document.documentElement.scrollWidth") <= 380, name
            assert browser.errors == []
            assert [x for x in browser.requests if not x.startswith(("file:", "data:"))] == []
