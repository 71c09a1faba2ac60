"""One crew of processes for all tests of a worker."""

import pytest

from crew import Crew


@pytest.fixture(scope="session")
def crew():
    crew = Crew()
    yield crew
    crew.close()
