"""Old names are refused with the new one in the message."""

import pytest

import cumulant as cm
from cumulant.core.renamed import moved, renamed


def test_old_keyword_names_the_new_one():
    @renamed(old="new")
    def f(new=1):
        return new

    assert f(new=2) == 2
    assert f() == 1
    with pytest.raises(cm.InputError, match="f: 'old' is now 'new'"):
        f(old=2)  # pyright: ignore


def test_moved_module_attribute():
    with pytest.raises(AttributeError, match=r"is now cumulant\.lab\.claims"):
        _ = cm.claims  # pyright: ignore
    with pytest.raises(AttributeError, match="has no attribute 'absent'"):
        moved("m", "absent", {"there": "m.here"})
