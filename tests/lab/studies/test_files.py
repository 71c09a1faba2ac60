"""Study files: what is read, and how a mistake is told."""

from __future__ import annotations

import pytest

import cumulant as cm
from cumulant.lab.studies.conducting import conduct
from cumulant.lab.studies.reading import known, read, selected

GOOD = """title = "t"
question = "q"
task = "recall"
minutes = 1
seeds = [0, 1]

[settings]
flips = 0.2

[tuning]
rates = [0.1]

[variants]
exp = { kernel = "exp" }
two = { kernel = "taylor2" }

[[rules]]
name = "ahead"
says = "exp recalls more"
quantity = "capacity"
variant = "exp"
above = ["two"]
"""


@pytest.fixture
def write(tmp_path):
    def made(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return path

    return made


def test_a_file_is_read(write):
    study = read(write(GOOD))
    assert study.name == "mine"
    assert study.settings_of("two") | {"kernel": "taylor2"} == study.settings_of("two")
    assert study.settings["flips"] == 0.2
    assert study.rules[0].above == ("two",)
    assert [x.seed for x in study.final_jobs("exp", 0.1, 1.0)] == [0, 1]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("flips = 0.2", "flip = 0.2", r"line 8: unknown key 'flip'; did you mean 'flips'"),
        ("seeds =", "seed =", r"line 5: unknown key 'seed'; did you mean 'seeds'"),
        ("flips = 0.2", 'flips = "few"', r"line 8: key 'flips' must be int or float, not str"),
        ("minutes = 1", "minutes = true", r"line 4: key 'minutes' must be int or float, not bool"),
        ('task = "recall"', 'task = "chess"', r"line 3: there is no task 'chess'; the tasks are l"),
        ("minutes = 1", "minutes = 0", r"line 4: the budget must be positive"),
        ("seeds = [0, 1]", "seeds = [0, 0]", r"line 5: seeds are different integers"),
        ('above = ["two"]', 'above = ["tow"]', r"line 22: there is no variant 'tow'; the variant"),
        ('above = ["two"]', "", r"rule 'ahead' needs exactly one of below, above"),
        ('title = "t"', 'title = "t', r"is not TOML: .*line 1"),
        ('question = "q"\n', "", r"lacks the key 'question'"),
        ('exp = { kernel = "exp" }', 'exp = { kernal = "exp" }', r"line 14: unknown key 'kernal'"),
    ],
)
def test_a_mistake_names_its_line_and_key(write, old, new, says):
    assert old in GOOD
    with pytest.raises(cm.InputError, match=says):
        read(write(GOOD.replace(old, new)))


def test_unknown_names_list_the_known_ones(write):
    with pytest.raises(cm.InputError, match="the studies are dot-or-cosine, expansion"):
        read("nothing")
    study = read(write(GOOD))
    with pytest.raises(cm.InputError, match="the variants are exp, two"):
        selected(study, ["three"])
    alone = selected(study, ["exp"])
    assert list(alone.variants) == ["exp"]
    assert not alone.rules  # it speaks of a variant that is gone


def test_the_search_has_seeds_of_its_own(write):
    wrong = GOOD.replace("rates = [0.1]", "rates = [0.1]\nseeds = [1]\nsteps = 3")
    with pytest.raises(cm.InputError, match="seeds of the final runs"):
        read(write(wrong))


@pytest.mark.parametrize("name", known())
def test_the_studies_that_come_along_are_sound(name):
    study = read(name)
    assert any(rule.form == "statement" for rule in study.rules)
    assert len(study.seeds) >= 3
    quick = study.quickly()
    assert set(quick.variants) == set(study.variants)
    counts = dict.fromkeys(study.variants, 0)
    for job in study.tuning_jobs():
        counts[job.variant] += 1
    assert len(set(counts.values())) == 1  # the same effort for each


def test_an_impossible_budget_says_the_estimate(write, tmp_path):
    study = read(write(GOOD.replace("minutes = 1", "minutes = 0.00001")))
    with pytest.raises(cm.InputError, match=r"about \d+ s with 1 at once, but its budget is 1e-05"):
        conduct(study, tmp_path / "runs")
