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


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (cm, "Normal", "MeanCovarianceGaussian"),
        (cm.measures, "Link", "Solution"),
        (cm.measures, "Status", "Outcome"),
        (cm.dynamics, "Status", "Outcome"),
        (cm.dynamics, "Bounds", "ExpansionBounds"),
        (cm.dynamics, "bounds", "expansion_bounds"),
        (cm.dynamics, "start", "initial_cloud"),
        (cm.dynamics, "norm", "cloud_norm"),
        (cm.dynamics, "spread", "cloud_spread"),
        (cm.dynamics, "entropy", "cloud_entropy"),
    ],
)
def test_old_names_say_the_new_one(module, old, new):
    with pytest.raises(AttributeError, match=rf"\.{old} is now .*\.{new}$"):
        getattr(module, old)
    assert hasattr(cm, new) or hasattr(module, new)


def test_old_keywords_say_the_new_one():
    with pytest.raises(cm.InputError, match="initial_cloud: 'seed' is now 'generator'"):
        cm.dynamics.initial_cloud("sphere", 3, 2, seed=0)  # pyright: ignore
