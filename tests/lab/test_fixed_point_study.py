"""The experiments behind docs/fixed-point.md find what the page says, in small."""

from __future__ import annotations

from PIL import Image

from cumulant.lab.fixed_points import study
from cumulant.lab.fixed_points.figures import draw


def test_what_the_page_says(tmp_path):
    said = []
    found = study.run(quick=True, progress=said.append)
    by_name = {(r["contraction"], r["points"]): r for r in found.rejected}
    for n in (32, 128):
        assert by_name["none", n]["rejected"][0] <= 0.2  # Gaussian clouds are called Gaussian
        assert by_name["none", n]["rejected"][2] <= 0.2  # and stay so for a while
        assert by_name["sphere", n]["rejected"][1] > 0.9  # not after one projection
        assert by_name["layer norm", n]["rejected"][1] > 0.9
        assert by_name["whiten", n]["rejected"][-1] > 0.5  # nor by whitening in the end
    assert found.counts[0]["clusters"][-1] < found.counts[1]["clusters"][-1]
    law, particles = found.followed
    early = [k for k, t in enumerate(particles["times"]) if t <= 0.5]
    exact = lambda t: 1 / (4 - 2 * t)
    for k in early:
        assert abs(particles["variance"][k] / exact(particles["times"][k]) - 1) < 0.05
    late = max(k for k, t in enumerate(particles["times"]) if t < 2)
    assert particles["variance"][late] < 0.75 * exact(particles["times"][late])
    assert abs(law["variance"][-1] / exact(law["times"][-1]) - 1) < 1e-4
    assert len(said) > 10
    for path in draw(found, tmp_path):
        with Image.open(path) as image:
            assert min(image.size) > 300
