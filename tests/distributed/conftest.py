"""One crew of processes for all tests of a worker."""

import pytest

from crew import Crew


@pytest.fixture(scope="session")
def crew():
    crew = Crew()
    yield crew
    crew.close()


def pytest_collection_modifyitems(items):
    """On one worker, where tests run on several: a second crew would only take its cores."""
    for item in items:
        if "crew" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("crew"))
