"""The public surface, the direction of imports, and what importing the library costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cumulant as cm

SOURCE = Path(cm.__file__).parent

# From the bottom up; a layer may import itself and what stands before it.
LAYERS = [
    *("core", "figures", "pages", "distributed", "kernels", "measures", "testing"),
    *("attention", "derivatives", "dynamics", "memory", "contrastive", "filtering", "nn"),
    *("integrations", "lens", "serve", "lab", "cli"),
]


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "cumulant" and len(parts) > 1 else None


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            if node.module == "cumulant":
                found |= {f"cumulant.{alias.name}" for alias in node.names}
    return found


def modules():
    return [p for p in SOURCE.rglob("*.py") if p.parent != SOURCE]


def test_every_folder_is_a_layer():
    folders = {p.relative_to(SOURCE).parts[0] for p in modules()}
    assert folders <= set(LAYERS)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downward(path):
    own = LAYERS.index(path.relative_to(SOURCE).parts[0])
    for module in imports(path):
        other = layer_of(module)
        if other in LAYERS:
            assert LAYERS.index(other) <= own, f"{path.name} imports {module}"


def test_one_module_imports_torch_distributed():
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE) != Path("distributed/ranks.py"):
            assert not any(m.startswith("torch.distributed") for m in imports(path)), path


def test_public_surface():
    assert sorted(cm.__all__) == [
        "Attended",
        "Bernoulli",
        "Beta",
        "Binomial",
        "Categorical",
        "ConvergenceError",
        "DerivativeReport",
        "Dirichlet",
        "Empirical",
        "Exponential",
        "FixedShapeGamma",
        "Gamma",
        "Gaussian",
        "GaussianMixture",
        "Geometric",
        "GroupError",
        "InputError",
        "MeanCovarianceGaussian",
        "Measure",
        "Memory",
        "Mixture",
        "NoSolutionError",
        "Outcome",
        "Poisson",
        "Received",
        "TopKeys",
        "UnknownFieldError",
        "VonMisesFisher",
        "attend",
        "attend_packed",
        "check_derivatives",
        "contrastive",
        "derivatives",
        "differentiable",
        "distributed",
        "dynamics",
        "engine",
        "filtering",
        "from_torch",
        "lens",
        "linear_cross_entropy",
        "maximum_entropy",
        "memory",
        "merge",
        "nn",
        "posterior",
        "project",
        "rollout",
        "scaled_dot_product_attention",
        "sdpa_replaced",
        "value_checks",
    ]
    for name in cm.__all__:
        assert getattr(cm, name).__doc__


def test_signature_is_torchs():
    import inspect

    parameters = inspect.signature(cm.scaled_dot_product_attention).parameters
    assert list(parameters) == [
        *("query", "key", "value", "attn_mask", "dropout_p"),
        *("is_causal", "scale", "enable_gqa"),
    ]
    defaults = [p.default for p in parameters.values()][3:]
    assert defaults == [None, 0.0, False, None, False]


def test_import_pulls_in_nothing_optional():
    code = (
        "import sys, torch; before = set(sys.modules); import cumulant; cumulant.attend; "
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    third_party = set(out.stdout.split()) - {"cumulant"} - set(sys.stdlib_module_names)
    assert third_party == set()


def test_import_waits_for_no_part_that_was_not_asked_for():
    code = (
        "import sys, cumulant\n"
        "def parts(): print(*{m.split('.')[1] for m in sys.modules if m.startswith('cumulant.')})\n"
        "parts(); cumulant.attend; parts(); print(cumulant.nn.Hopfield, cumulant.Memory)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = out.stdout.splitlines()
    assert not first
    assert set(second.split()) == {"attention", "core", "distributed", "kernels"}
    assert "Hopfield" in third
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = cm.nonsense
    assert set(cm.__all__) <= set(dir(cm))


def test_documentation_names_every_folder():
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    for folder in {p.parent.relative_to(SOURCE) for p in modules()}:
        assert f"`{folder}/`" in text
