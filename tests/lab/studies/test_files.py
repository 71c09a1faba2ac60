"""Study files: what is read, and how a mistake is told."""

from __future__ import annotations

import random

import pytest

import cumulant as cm
from cumulant.lab.studies.conducting import conduct, estimate
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
        ("flips = 0.2", "flip = 0.2", r"line 8: unknown key 'flip'; did you mean 'flips'\?$"),
        ("seeds =", "seed =", r"line 5: unknown key 'seed'; did you mean 'seeds'"),
        ("flips = 0.2", 'flips = "few"', r"line 8: key 'flips' must be a number, not a string"),
        (
            "minutes = 1",
            "minutes = true",
            r"line 4: key 'minutes' must be a number, not true or false",
        ),
        ('task = "recall"', 'task = "chess"', r"line 3: there is no task 'chess'; the tasks are l"),
        ("minutes = 1", "minutes = 0", r"line 4: the budget must be positive"),
        ("seeds = [0, 1]", "seeds = [0, 0]", r"line 5: seeds are different integers"),
        ('above = ["two"]', 'above = ["tow"]', r"line 22: there is no variant 'tow'; the variant"),
        ('above = ["two"]', "", r"rule 'ahead' needs exactly one of below, above"),
        ('title = "t"', 'title = "t', r"is not TOML: .*line 1"),
        ('question = "q"\n', "", r"lacks the key 'question'"),
        ('exp = { kernel = "exp" }', 'exp = { kernal = "exp" }', r"line 14: unknown key 'kernal'"),
        ("minutes = 1", "minutes = nan", r"line 4: the budget must be positive and finite"),
        ("seeds = [0, 1]", "seeds = [true, false]", r"line 5: seeds are different integers"),
        ("seeds = [0, 1]", "seeds = [0, 99999999999999999999]", r"line 5: seeds are different"),
        ("flips = 0.2", "flips = 0.5", r"line 8: recall: flips must be finite and .* at most 0.49"),
        ("flips = 0.2", "dims = []", r"line 8: recall: dims must be different positive integers"),
        ("flips = 0.2", 'betas = ["a"]', r"line 8: recall: betas must be different positive n"),
        ("rates = [0.1]", "rates = []", r"line 11: rates are different numbers, at least one"),
        ("rates = [0.1]", 'rates = ["x"]', r"line 11: rates are positive numbers, not x"),
        ("rates = [0.1]", "rates = [-1]", r"line 11: rates are positive numbers, not -1"),
        ("rates = [0.1]", "betas = [nan]", r"line 11: betas are positive numbers, not nan"),
        ("rates = [0.1]", "steps = -2", r"line 11: a search has at least 0 steps"),
        ('kernel = "taylor2"', 'kernel = "gauss"', r"line 15: there is no kernel 'gauss'; the ker"),
        ("two = {", '"../two" = {', r"line 15: a variant's name has .*, not '\.\./two'"),
        ("two = {", '"t\\n" = {', r"a variant's name has .*, not 't\\n'"),
        ('"capacity"', '"capacty"', r"line 20: unknown quantity 'capacty'; did you mean"),
        ('"capacity"', '"capacity_7"', r"line 20: unknown quantity 'capacity_7'; did you mean"),
        (
            'says = "exp recalls more"',
            "says = []",
            r"line 19: key 'says' must be a string, not a list",
        ),
        ('above = ["two"]', 'above = "two"', r"line 22: key 'above' must be a list, not a string"),
        ('above = ["two"]', 'above = ["exp"]', r"line 21: 'exp' cannot be its own rival"),
        ('above = ["two"]', "at_least = nan", r"line 22: 'at_least' must be finite"),
        ('above = ["two"]', "at_least = 1\nby = 0.1", r"line 23: rule 'ahead': 'by' goes with"),
        (
            'variant = "exp"',
            "variant = 3",
            r"line 21: key 'variant' must be a string, not an integer",
        ),
        (
            "[variants]",
            "[quick]\nsettings = 3\n[variants]",
            r"line 14: key 'settings' must be a table",
        ),
        ("[variants]", "[quick]\nsettings = {most = 0}\n[variants]", r"line 14: recall: most m"),
        (
            "[variants]",
            '[claim]\nsource = "s"\n[variants]',
            r"line 13: a claim lacks the key 'stat",
        ),
        ('title = "t"', "title = " + 5000 * "[", r"is not TOML: maximum recursion"),
        ('title = "t"', "title = " + 5000 * "9", r"is not TOML: Exceeds the limit"),
    ],
)
def test_a_mistake_names_its_line_and_key(write, old, new, says):
    assert old in GOOD
    with pytest.raises(cm.InputError, match=says):
        read(write(GOOD.replace(old, new)))


def test_a_model_that_no_machine_holds_is_refused(write):
    """Sizes whose product overflows, and a batch that no memory holds."""
    language = GOOD.replace("recall", "language").replace("flips = 0.2", "width = 32000000000")
    language = language[: language.index("[[rules]]")]
    with pytest.raises(cm.InputError, match="line 8: language: no model can have these sizes"):
        read(write(language))
    large = write(language.replace("width = 32000000000", "batch = 4000000000000"))
    with pytest.raises(cm.InputError, match=r"mine cannot make a step: .*memory"):
        estimate(read(large), 1)


def test_the_line_is_that_of_the_rule(write):
    """Two tables of one name: the mistake is in the second."""
    again = GOOD[GOOD.index("[[rules]]") :].replace("ahead", "behind")
    with pytest.raises(cm.InputError, match="line 30: a rule's form is one of"):
        read(write(f'{GOOD}form = "noted"\n{again}form = "noisy"\n'.replace("above", "#above", 1)))


def test_a_file_of_an_editor_that_marks_its_encoding(write):
    path = write(GOOD)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path).title == "t"


def test_a_file_that_is_no_text(write, tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(cm.InputError, match="is not TOML: 'utf-8' codec"):
        read(tmp_path / "mine.toml")


def test_garbage_is_an_input_error(write, tmp_path):
    """Bytes changed, dropped and repeated: an error of one line, or a study."""
    rng, path = random.Random(0), tmp_path / "mine.toml"
    told: list[str] = []
    for _ in range(400):
        x = bytearray(GOOD.encode())
        for _ in range(rng.randint(1, 3)):
            k = rng.randrange(len(x))
            if rng.random() < 0.5:
                x[k] = rng.choice(b'[]{}="#,.019-\n\xff')
            elif rng.random() < 0.5:
                del x[k : k + rng.randint(1, 6)]
            else:
                start = rng.randrange(len(x))
                x[k:k] = x[start : start + rng.randint(1, 30)]
        path.write_bytes(bytes(x))
        try:
            read(path)
        except cm.InputError as error:
            told.append(str(error))
    assert len(told) > 200
    assert not any("\n" in x for x in told)


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
