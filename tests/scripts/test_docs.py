"""What the documentation says exists: error texts, files, links, options and fields."""

import ast
import re
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from sfm_dpo.config import DATACLASSES, _Parser
from tests.commands import PAGES, ROOT, text

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
SCRIPTS = {path.name: path for path in (*ROOT.glob("scripts/*.py"), *ROOT.glob("bench/*.py"), ROOT / "train_dpo.py")}
SLURM = set(
    "account array begin cpus-per-task dependency exclude export format gpus-per-node gres kill-on-bad-exit label mem "
    "name nodes ntasks ntasks-per-node open-mode output partition requeue signal time wait batch".split()
)
# Of git, pip, wandb sync, trl and torchrun, in prose
OTHER = {"no-deps", "append", "help", "nproc-per-node"}
OWN_FOLDERS = "bench|configs|data|docs|recipes|scripts|sfm_dpo|tests"


def strings(path: Path) -> list[str]:
    """Every string in a Python file; in f-strings a NUL stands for each value."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def rows(page: str, start: str, end: str) -> list[list[str]]:
    """Cells of the tables between two headings, without heads and rules."""
    part = (ROOT / page).read_text().split(start, 1)[1].split(end, 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ") and "|---" not in line]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def quoted(cell: str) -> list[str]:
    """The constant parts of the texts in backticks."""
    return [part.strip() for code in re.findall(r"`([^`]+)`", cell) for part in code.split("...") if part.strip()]


def test_quoted_errors_are_in_the_source():
    sources = [string for path in (*ROOT.glob("sfm_dpo/**/*.py"), *SCRIPTS.values()) for string in strings(path)]
    sources += [path.read_text() for path in ROOT.glob("scripts/*.sh")]
    cells = [row[0] for row in rows("docs/troubleshooting.md", "## Configuration", "## Known texts of libraries")]
    cells = [cell for cell in cells if cell != "text"]
    assert len(cells) > 50
    wrong = [part for cell in cells for part in quoted(cell) if not any(part in string for string in sources)]
    assert not wrong


def test_every_exit_code_is_explained():
    codes = {row[0] for row in rows("docs/troubleshooting.md", "# Troubleshooting", "## Configuration")[1:]}
    said = re.findall(r"\b(\d+) (?:done|crashed|wrong|refused|stopped|trained)", (ROOT / "train_dpo.py").read_text())
    raised = re.findall(r"exit_code=(\d+)", "".join(path.read_text() for path in ROOT.glob("sfm_dpo/**/*.py")))
    bash = re.findall(r"^ *exit (\d+)$", (ROOT / "scripts/common.sh").read_text(), re.M)
    assert {*said, *raised, *bash} <= codes and {"0", "1", "2", "3", "4", "5", "69", "75"} == codes


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_named_files_exist(path):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text(path))]
    links = [link for link in links if link and not link.startswith(("http:", "https:", "mailto:"))]
    missing = [link for link in links if not (path.parent / link).exists()]
    # Not what begins elsewhere: open-instruct/scripts/..., site-packages/trl/scripts/...
    named = re.findall(rf"(?<![\w/.-])(?:{OWN_FOLDERS})/[\w./-]*\w", text(path))
    missing += [name for name in named if "mine" not in name and not (ROOT / name).exists()]
    assert not missing


def fields() -> set[str]:
    return {option for action in _Parser(DATACLASSES)._actions for option in action.option_strings} | {"--config"}


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_named_options_exist(path):
    """After the name of a script its own and, where it reads recipes, their fields; anywhere else any of these."""
    of = {name: {f"--{word.removeprefix('--')}" for word in strings(script)} for name, script in SCRIPTS.items()}
    known = fields()
    launcher = set(launch_command_parser()._option_string_actions) | {option.replace("-", "_") for option in known}
    slurm = {f"--{option}" for option in SLURM | OTHER}
    anywhere = known | slurm | launcher | set().union(*of.values())
    wrong = []
    for line in text(path).splitlines():
        command = re.search(r"(?:python|sbatch|accelerate launch)\b.*?([\w/]+\.(?:py|sh))\b(.*)", line)
        after = command[2] if command else ""
        name = command and Path(command[1]).name
        for option in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", line):
            if not command or option not in re.findall(r"--[\w-]+", after):
                wrong += [option] if option not in anywhere else []
            elif name.endswith(".sh") or name == "train_dpo.py":
                wrong += [option] if option not in known else []
            elif name in of:
                takes_fields = re.search(r"parse_config|parse_known_args|load_batch", SCRIPTS[name].read_text())
                wrong += [option] if option not in of[name] | (known if takes_fields else set()) | slurm else []
    assert not wrong


def test_all_recipes_are_on_their_page():
    table = {row[0].strip("`"): row for row in rows("docs/recipes.md", "# Recipes", "**Computed**")[1:]}
    assert table.keys() == {recipe.stem for recipe in RECIPES}
    for recipe in RECIPES:
        found = re.search(
            r"^# Computed +([\d.]+) GiB on (?:each of )?(\w+) (\w+); (?:([\d.]+) hours)?", recipe.read_text(), re.M
        )
        given = yaml.safe_load(recipe.read_text())
        row = table[recipe.stem]
        assert f"{given['learning_rate']:.1e}".replace(".0e", "e").replace("e-0", "e-") in row[3], recipe.stem
        assert f"{given['max_length']:,}" in row[3], recipe.stem
        if found:
            gib, gpus, gpu, hours = found.groups()
            assert row[6] == gib and row[5] == f"{'1' if gpus == 'a' else gpus} {gpu}", recipe.stem
            assert row[7].split(" ")[0] == (hours or "minutes"), recipe.stem


def test_migration_names_fields_that_exist():
    known = {option.removeprefix("--") for option in fields()}
    tables = rows("docs/migration.md", "## From `trl dpo`", "## Metrics")
    assert len(tables) > 60
    wrong = []
    for row in tables:
        codes = re.findall(r"`([^`]+)`", row[1]) + re.findall(r"`(\w+: [^`]+)`", row[2])
        names = [re.match(r"[a-z_0-9]+(?=:|$)", code) for code in codes]
        wrong += [name[0] for name in names if name and name[0] not in known]
    assert not wrong
