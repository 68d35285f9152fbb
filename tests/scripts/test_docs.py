"""Links, files and options that the documentation names exist."""

import ast
import re

import pytest
from accelerate.commands.launch import launch_command_parser

from sfm_dpo.config import FieldParser
from tests.commands import PAGES, ROOT, text

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
SLURM = (
    "account array begin cpus-per-task dependency exclude export format gpus-per-node gres kill-on-bad-exit "
    "kill-on-invalid-dep label mem name nodes ntasks ntasks-per-node open-mode output partition requeue signal time "
    "wait batch"
)
OTHER = "no-deps append help nproc-per-node"  # of git, pip, wandb sync, trl and torchrun
OWN_FOLDERS = "bench|configs|data|docs|recipes|scripts|sfm_dpo|tests"


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Those of train_dpo.py, of the scripts (any string with two dashes in front), of accelerate and of Slurm."""
    known = {f"--{option}" for option in f"{SLURM} {OTHER}".split()}
    known.update(FieldParser()._option_string_actions, launch_command_parser()._option_string_actions)
    for script in (*ROOT.glob("scripts/*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("sfm_dpo/**/*.py")):
        values = [node.value for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Constant)]
        known |= {value for value in values if isinstance(value, str) and value.startswith("--")}
    return known


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_named_files_and_options_exist(path, options):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text(path))]
    missing = [
        link for link in links if not link.startswith(("http", "mailto:")) and not (path.parent / link).exists()
    ]
    # Not what begins elsewhere: open-instruct/scripts/..., site-packages/trl/scripts/...
    named = re.findall(rf"(?<![\w/.-])(?:{OWN_FOLDERS})/[\w./-]*\w", text(path))
    named = [name for name in named if "mine" not in name]
    missing += [name for name in named if not (ROOT / name).exists() and not (ROOT / "sfm_dpo" / name).exists()]
    assert not missing
    assert not set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text(path))) - options


def test_all_recipes_are_on_their_page():
    page = (ROOT / "docs/recipes.md").read_text()
    assert not [recipe.stem for recipe in RECIPES if f"`{recipe.stem}`" not in page]
