"""Fixtures shared by the whole suite."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

# Some virtual machines announce AMX and then fault on its instructions ("Illegal instruction" in a
# bfloat16 matrix product of torch's oneDNN). oneDNN reads this at its first use, and does without.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A shell without job control starts background work with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import cumulant as cm
from cumulant.kernels import tiles
from cumulant.kernels.engines import engines

# The tier of a test, by the beginning of its path (CONTRIBUTING.md says what each covers).
# Everything else is what `make check` runs.
TIERS = {
    "ranks": ("distributed/", "lens/test_shards.py"),
    "browser": ("test_site.py", "lens/test_report", "lab/report/", "pages/", "serve/"),
    "ledger": ("lab/claims/", "lab/test_fixed_point_study.py"),
    "slow": (
        "test_peak_memory.py",
        "test_documents.py",
        "test_notebooks.py",
        "test_package.py",
        "test_cli.py",
        "core/test_core_files.py",
        "fuzz/",
        "integrations/",
        "lab/test_workers.py",
        "kernels/test_potential.py",
        "laws/test_inverse_sublayer.py",
        "laws/test_population.py",
        "laws/test_spins.py",
        "laws/test_projection.py",
        "laws/test_gibbs.py",
        "derivatives/test_checker.py",
        "derivatives/test_torch_faults.py",
        "derivatives/test_training_with_jvps.py",
        "derivatives/test_transformers.py",
        "dynamics/test_step.py::test_a_hundred_thousand_points_step",
        "filtering/test_calibration.py",
        "filtering/test_filter_command.py",
        "filtering/test_filter_derivatives.py::test_single_precision_stays",
        "filtering/test_filter_example.py",
        "filtering/test_calibration.py",
        "filtering/test_fitting.py",
        "filtering/test_other_packages.py",
        "filtering/test_smoothing_singular.py",
        "lens/test_examine",
        "lens/test_images.py",
        "lens/test_lens_command.py",
        "lens/test_lens_models.py",
        "lens/test_model_types.py",
        "lens/test_monitor.py",
        "lens/test_patterns.py::test_smollm2",
        "measures/test_edges.py::test_mixtures_know_their_hull",
        "measures/test_families.py",
        "nn/test_transformer.py::test_compiles",
        "lab/studies/",
    ),
}


# Tests that share something expensive (a built site, a wheel, a server of processes) stay together.
TOGETHER = ("test_site.py", "test_package.py", "lens/test_shards.py")


def pytest_collection_modifyitems(items):
    root = Path(__file__).parent
    if DEVICE:
        items[:] = [item for item in items if _on_other_device(item)]
    for item in items:
        if not item.path.is_relative_to(root):
            continue
        where = f"{item.path.relative_to(root)}::{item.name}"
        for tier, beginnings in TIERS.items():
            if where.startswith(beginnings):
                item.add_marker(tier)
        for file in TOGETHER:
            if where.startswith(file):
                item.add_marker(pytest.mark.xdist_group(file))
    # What takes long starts first, so that the processes finish together.
    items.sort(key=lambda item: not any(item.get_closest_marker(tier) for tier in TIERS))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _modes():
    """A test that leaves a mode of torch's switched fails itself, not the tests after it."""
    yield
    left = {"grad": torch.is_grad_enabled(), "dtype": torch.get_default_dtype()}
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    assert left == {"grad": True, "dtype": torch.float32}


@pytest.fixture
def small_tiles(monkeypatch):
    """Cut even tiny problems into many tiles, so that every seam is crossed."""
    original = tiles.iterate

    def iterate(batch, grid, area, *, whole_rows=False):
        return original(batch, grid, 6, whole_rows=whole_rows)

    monkeypatch.setattr(tiles, "SIDE", 3)
    monkeypatch.setattr(tiles, "iterate", iterate)


# A test of a class runs once for each engine, each time on a new instance that shares nothing.
hypothesis.settings.register_profile(
    "engines", suppress_health_check=[hypothesis.HealthCheck.differing_executors]
)
hypothesis.settings.load_profile("engines")

# The tests of these folders and files run on every engine that can run on this machine, except
# those that take no sum over keys or choose an engine themselves.
ON_EVERY_ENGINE = {
    *("kernels", "attention", "laws"),
    *("test_filters.py", "test_filter_derivatives.py", "test_filtering_edges.py"),
    *("test_fitting.py", "test_other_packages.py", "test_smoothing.py"),
}
ON_NONE = {
    *("test_projection.py", "test_gibbs.py", "test_triton.py", "test_triton_tiles.py"),
    *("test_synchronizations.py", "test_cuda_plan.py", "triton_on_a_device.py"),
}


# A second device (`other_device.py`) has a run of its own, because torch counts the devices of a
# process once: CUMULANT_OTHER_DEVICE=1 runs every test of the files below there, so that code which
# assumes the CPU fails somewhere, except those named: by parts of names, and why.
DEVICE = os.environ.get("CUMULANT_OTHER_DEVICE", "")
DEVICE_FILES = ("core/test_other_device.py", "kernels/test_synchronizations.py")
DEVICE_FILES += ("kernels/test_cuda_plan.py", "kernels/triton_on_a_device.py")
collect_ignore = [] if DEVICE else ["other_device.py", *DEVICE_FILES]
ON_OTHER_DEVICE = {
    "test_derivatives.py": (),
    "test_attend.py": (
        *("one_dead_row", "a_nan_query", "infinity_removes_a_key"),  # index by a list
        *("nested_tensors", "inference_mode"),  # which tensors written in Python do not have
        "only_results_are_taken",  # the type's name
    ),
    "test_info_nce.py": (
        *("where_people_expect_a_value", "needs_a_positive_on_both"),  # arguments made at import
    ),
    "test_dense_memory.py": ("TestFiles", "one row for each pattern"),  # no storage; as above
    "test_link.py": (  # measures made at import, on the CPU
        *("status_of_each_mean", "outside_raises", "error_outside", "a_stall_is", "hull_of"),
        *("points_without_weight", "weights_do_not_move", "rows_that_fail", "plain_forward_mode"),
        "status_survives_vmap",
    ),
    "test_filters.py": ("interface_of_what_was_asked_for",),  # counts the calls of an engine
}


def _on_other_device(item):
    if str(item.path).endswith(DEVICE_FILES):
        return True
    call = getattr(item, "callspec", None)
    if call is None or call.params.get("engine") != "other":
        return False
    return not any(part in item.nodeid for part in ON_OTHER_DEVICE[item.path.name])


def pytest_generate_tests(metafunc):
    path = metafunc.definition.path
    if "engine" not in metafunc.fixturenames:
        return
    names = [None]
    if ON_EVERY_ENGINE & {path.parent.name, path.name} and path.name not in ON_NONE:
        names = [name for name, status in engines().items() if status.available]
    if DEVICE and path.name in ON_OTHER_DEVICE:
        # Before any test runs: the first backward pass of a process counts its devices for good.
        importlib.import_module("other_device")
        names = [*names, "other"]
    if names != [None]:
        metafunc.parametrize("engine", names, indirect=True)


@pytest.fixture(autouse=True)
def engine(request):
    """The name of the engine that computes, where the tests say one; "other" is another device."""
    name = getattr(request, "param", None)
    context = contextlib.nullcontext()
    if name == "other":
        from other_device import moved

        context = moved()
    elif name is not None:
        context = cm.engine(name)
    with context:
        yield name
