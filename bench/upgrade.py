#!/usr/bin/env python
"""What the newest versions of the pinned libraries would break; `make upgrade` runs it.

    python bench/upgrade.py .venv-upgrade

It makes a second environment, installs the newest versions that agree with each other there, and runs the canaries,
the golden losses and the oracle. The table shows each library of requirements.txt that is newer than its pin. A canary
fails if its library has fixed the bug, or has changed what the canary calls: see pytest's output above the table.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
TESTS = ["-m", "not grid", "-k", "canary or test_golden or test_oracle"]
UPSTREAM = re.compile(r"^\| (\w+) .*`(test_canary_\w+)` \|$", re.MULTILINE)  # a row of the page's table


def read_pins(name: str) -> dict[str, str]:
    """Package, as PyPI spells it -> version, from requirements file `name`."""
    pins: dict[str, str] = {}
    for line in (ROOT / name).read_text().splitlines():
        line = line.split("#")[0].strip()
        if line:
            package, pin = line.split("==")
            pins[package.partition("[")[0].lower().replace("_", "-")] = pin  # without extras
    return pins


def install(venv: Path, packages: list[str]) -> dict[str, str]:
    """Makes the environment `venv`, with the newest `packages`. Returns the version of each package there."""
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [f"{venv}/bin/python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
    listed = json.loads(subprocess.check_output([*pip, "list", "--format", "json"]))
    return {package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in listed}


def failing_tests(venv: Path) -> list[str]:
    """Runs TESTS in the environment; files that cannot be imported count as tests."""
    report = venv / "tests.xml"
    command = [f"{venv}/bin/python", "-m", "pytest", *TESTS, f"--junitxml={report}", "--continue-on-collection-errors"]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code not in (0, 1):
        sys.exit(f"error: pytest ended with code {code}")
    tree = ElementTree.parse(report)
    return [case.attrib["name"] for kind in ("failure", "error") for case in tree.iterfind(f".//testcase[{kind}]")]


def make_table(pins: dict[str, str], newest: dict[str, str], failing: list[str], page: str) -> str:
    """`page`: docs/internals/upstream.md, whose table names the library of each canary."""
    libraries = {canary: library for library, canary in UPSTREAM.findall(page)}
    fails = defaultdict(list)
    for test in failing:
        fails[libraries.get(test.partition("[")[0], "cause unknown")].append(f"`{test}`")
    rows = ["| library | pinned | newest | what fails |", "|---|---|---|---|"]
    for library in sorted({name for name, pin in pins.items() if newest[name] != pin} | set(fails)):
        versions = f"{pins.get(library, '')} | {newest.get(library, '')}"
        rows.append(f"| {library} | {versions} | {', '.join(fails[library]) or 'nothing'} |")
    return "\n".join(rows)


def main(venv: Path) -> None:
    pins = read_pins("requirements.txt")
    newest = install(venv, [*pins, *read_pins("requirements-dev.txt")])
    failing = failing_tests(venv)
    print(make_table(pins, newest, failing, (ROOT / "docs/internals/upstream.md").read_text()))


if __name__ == "__main__":
    main(Path(*sys.argv[1:] or [".venv-upgrade"]).absolute())
