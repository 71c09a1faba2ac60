"""Texts in: from files, folders and JSON lines, and what is said of those that are none."""

from __future__ import annotations

import json

import pytest

import cumulant as cm
from cumulant.lens.texts import PASSAGE_SOURCE, passage, read


def test_the_passage_is_plain_prose_of_known_origin():
    [text] = read()
    assert text == passage()
    assert 120 <= len(text.content.split()) <= 200
    assert text.content.startswith("When on board H.M.S. 'Beagle,' as naturalist")
    assert text.content.endswith("I have not been hasty in coming to a decision.")
    assert all(word in PASSAGE_SOURCE for word in ("Darwin", "Origin of Species", "1859"))


def test_everything_given_comes_in_order(tmp_path):
    first, second = tmp_path / "b.txt", tmp_path / "a.txt"
    first.write_text("Größe\n", encoding="utf-8")
    second.write_bytes(b"\xef\xbb\xbfmarked")
    lines = tmp_path / "c.jsonl"
    lines.write_text('{"text": "one"}\n\n{"text": "two", "id": 2}\n')
    found = list(read("zero", [first, str(second)], lines))
    assert [x.content for x in found] == ["zero", "Größe\n", "marked", "one", "two"]
    assert [x.name for x in found] == [
        *("text", str(first), str(second)),
        *(f"{lines}:1", f"{lines}:3"),
    ]


def test_a_single_path_is_not_a_list_of_letters(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("word")
    assert [x.content for x in read(files=str(path))] == ["word"]


def test_folders_are_walked_sorted(tmp_path):
    for name in ("b.md", "a/z.TXT", "a/y.txt", "c.py", ".git/d.txt", "e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [x.content for x in read(files=[tmp_path])] == ["a/y.txt", "a/z.TXT", "b.md", "e.txt"]


def test_json_lines_are_read_as_they_are_taken(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"body": "good"}\nnot json\n')
    texts = read(jsonl=path, field="body")
    assert next(texts).content == "good"
    with pytest.raises(cm.InputError, match="line 2 is not JSON"):
        next(texts)


def test_files_are_read_as_they_are_taken_but_must_exist_at_once(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("before")
    texts = read(files=[path])
    path.write_text("after")
    assert next(texts).content == "after"
    with pytest.raises(cm.InputError, match=r"no file or folder .*nowhere\.txt"):
        read(files=[path, tmp_path / "nowhere.txt"])
    with pytest.raises(cm.InputError, match=r"no file or folder .*nowhere\.jsonl"):
        read(jsonl=tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"caf\xe9 au lait", r"bad\.txt is not a text in UTF-8: byte 0xe9 at offset 3"),
        (b"abc\0\xff", "byte 0x00 at offset 3"),
        ("Wort".encode("utf-16"), "byte 0xff at offset 0"),
        (b"", r"bad\.txt is empty"),
        (b" \n\t\n", r"bad\.txt is empty"),
        (b"\xef\xbb\xbf", r"bad\.txt is empty"),
    ],
)
def test_files_that_are_no_text(tmp_path, raw, message):
    path = tmp_path / "bad.txt"
    path.write_bytes(raw)
    with pytest.raises(cm.InputError, match=message):
        list(read(files=[path]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", "line 2 is not JSON .*column 2"),
        ('["a"]', 'line 2 must be an object such as {"text"'),
        ('{"title": "x", "body": "y"}', "no field 'text'; its fields are 'title', 'body'"),
        ("{}", "its fields are none"),
        ('{"text": 3}', "line 2: the field 'text' must be a string, not int"),
        ('{"text": "  "}', "line 2: the field 'text' is empty"),
        ("[" * 100_000, "line 2"),
        ('{"text": ' + "9" * 5000 + "}", "line 2"),
    ],
)
def test_lines_that_hold_no_text(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"text": "good"}) + "\n" + line + "\n")
    with pytest.raises(cm.InputError, match=message) as caught:
        list(read(jsonl=path))
    assert "\n" not in str(caught.value)


def test_a_bad_byte_in_json_lines_is_located(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(
        cm.InputError, match="line 2 is not a text in UTF-8: byte 0xff at offset 10"
    ):
        list(read(jsonl=path))


def test_nothing_to_read(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(cm.InputError, match="is empty"):
        list(read(jsonl=tmp_path / "empty.jsonl"))
    with pytest.raises(cm.InputError, match=r"holds no \.txt or \.md files"):
        read(files=[tmp_path])
    with pytest.raises(cm.InputError, match="is a folder"):
        read(jsonl=tmp_path)
    with pytest.raises(cm.InputError, match="the text is empty"):
        read(" \n")
