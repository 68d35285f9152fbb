"""Every package that is imported is in the requirements, pinned to the version that the tests run on."""

import ast
import sys
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = {"sfm_dpo", "tests", "bench", "scripts", *(path.stem for path in ROOT.glob("*/*.py")), "train_dpo"}


def read_pins(name: str) -> dict[str, str]:
    """Package, as PyPI spells it -> version; of a requirements file and of those that it names with -r."""
    pins: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line.startswith("-r"):
            pins |= read_pins(line.split()[1])
        elif line:
            package, pin = line.split("==")
            pins[package.partition("[")[0].lower().replace("_", "-")] = pin  # without extras
    return pins


def test_lm_eval_is_installed_for_the_tests_and_not_for_training():
    assert (
        version("lm_eval")
        == read_pins("requirements-eval.txt")["lm-eval"]
        == read_pins("requirements-dev.txt")["lm-eval"]
    )
    assert "lm-eval" not in read_pins("requirements.txt")


def find_imports(paths: list[Path]) -> set[str]:
    """Top-level modules of other packages that the files import."""
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(str(node.module).split(".")[0])
    return modules - OWN - set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("requirements", "patterns"),
    [
        ("requirements.txt", ["sfm_dpo/**/*.py", "scripts/*.py", "*.py"]),
        ("requirements-dev.txt", ["tests/**/*.py", "bench/**/*.py", "data/*.py"]),
    ],
)
def test_imports_are_required_at_the_installed_version(requirements, patterns):
    imports = find_imports([path for pattern in patterns for path in ROOT.glob(pattern)])
    packages = packages_distributions()
    pins = read_pins(requirements)
    assert len(imports) > 5
    assert not [module for module in imports if packages[module][0].lower().replace("_", "-") not in pins]
    for package, pin in pins.items():
        assert version(package).split("+")[0] == pin, package  # torch's +cpu
