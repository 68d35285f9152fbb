"""Every package that is imported is in the requirements, pinned to the version that the tests run on."""

import ast
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distributions, packages_distributions, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = {"sfm_dpo", "tests", "bench", "scripts", *(path.stem for path in ROOT.glob("*/*.py")), "train_dpo"}


def read_pins(name: str) -> dict[str, str]:
    """Package, as PyPI spells it -> version, from requirements file `name`."""
    pins: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            package, pin = line.split("==")
            pins[package.partition("[")[0].lower().replace("_", "-")] = pin  # without extras
    return pins


def find_imports(paths: list[Path]) -> set[str]:
    """Top-level modules of other packages that the files import."""
    modules = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                modules.add(str(node.module).split(".")[0])
    return modules - OWN - set(sys.stdlib_module_names) - {"triton"}  # PyTorch's CUDA build installs it


@pytest.mark.parametrize(
    ("requirements", "patterns"),
    [
        (["requirements.txt"], ["sfm_dpo/**/*.py", "scripts/*.py", "*.py"]),
        (["requirements.txt", "requirements-dev.txt"], ["tests/**/*.py", "bench/**/*.py", "data/*.py"]),
    ],
)
def test_imports_are_required_at_the_installed_version(requirements, patterns):
    imports = find_imports([path for pattern in patterns for path in ROOT.glob(pattern)])
    packages = packages_distributions()
    pins: dict[str, str] = {}
    for name in requirements:
        pins |= read_pins(name)
    assert len(imports) > 5
    assert not [module for module in imports if packages[module][0].lower().replace("_", "-") not in pins]
    for package, pin in pins.items():
        assert version(package).split("+")[0] == pin, package  # torch's +cpu


def test_constraints_are_the_versions_of_this_environment():
    """As `make lock` writes them, with the parts of PyTorch's CUDA build, which a CPU environment lacks."""
    locked = read_pins("constraints.txt")
    installed = {}
    for found in distributions():
        is_vendored = "_vendor" in str(found.locate_file(""))  # in setuptools, once it is imported
        if found.name not in ("pip", "sfm-post-training") and not is_vendored:
            installed.setdefault(found.name.lower().replace("_", "-"), found.version.split("+")[0])
    assert {name: locked.get(name) for name in installed} == installed
    missing = locked.keys() - installed.keys()
    assert {name for name in missing if not name.startswith(("nvidia-", "cuda-"))} <= {"triton"}


@pytest.mark.slow
def test_wheel_holds_the_package_and_its_requirements(tmp_path):
    files = subprocess.check_output(["git", "ls-files", "sfm_dpo"], cwd=ROOT, text=True).split()
    requirements = [path.name for path in ROOT.glob("requirements*.txt")]
    for name in [*files, *requirements, "pyproject.toml", "README.md", "LICENSE"]:
        copy = tmp_path / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "./source"]
    subprocess.run(build, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == set(files)
    (installed,) = distributions(path=[str(wheel)])
    required = [requirement for requirement in installed.requires or [] if "extra ==" not in requirement]
    assert len(required) == len(read_pins("requirements.txt"))
    assert set(installed.metadata.get_all("Provides-Extra")) == {"dev", "eval"}
