"""Links, files and options that the documentation names exist, and its tables are those of the code."""

import ast
import csv
import dataclasses
import json
import os
import re
from itertools import groupby
from operator import itemgetter

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser

from sfm_dpo.common.errors import HUNG, RunEnd
from sfm_dpo.config.checks import MIGRATION
from sfm_dpo.config.effects import MAY_CHANGE
from sfm_dpo.config.fields import DATACLASSES, FIELD_GROUPS, FieldParser, TrainConfig
from sfm_dpo.model.flops import peak_flops
from tests.commands import PAGES, ROOT, text

RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
SLURM = (
    "account array begin cpus-per-task dependency environment exclude export format gpus-per-node gres "
    "kill-on-bad-exit kill-on-invalid-dep label me mem name nodes ntasks ntasks-per-node open-mode output partition "
    "requeue signal time wait batch"
)
OTHER = "index-url no-deps append help nproc-per-node"  # of git, pip, wandb sync, trl and torchrun
REFERENCE = """
Every field of this project, and the fields of TRL's `DPOConfig` and `ModelConfig` that a recipe is likely to set; the
other fields of both are accepted, too. A recipe is YAML with these names, and `--name value` on the command line
overrides it; `--name=` empties a list or an optional field, `--name '[a, b]'` and `--name '{a: b}'` are YAML, too.
`python train_dpo.py --help` prints the same list.
*resume*: whether a run may be resumed with another value. The tables are generated:
`RECORD=1 pytest tests/scripts/test_docs.py`."""


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Those of train_dpo.py, of the scripts (any string with two dashes in front), of accelerate and of Slurm."""
    known = {f"--{option}" for option in f"{SLURM} {OTHER}".split()}
    known.update(FieldParser()._option_string_actions, launch_command_parser()._option_string_actions)
    for script in (*ROOT.glob("scripts/*.py"), *ROOT.glob("bench/*.py"), *ROOT.glob("sfm_dpo/**/*.py")):
        values = [node.value for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Constant)]
        known |= {value for value in values if isinstance(value, str) and value.startswith("--")}
    return known


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_links_lead_to_a_file_and_a_heading(path):
    for link, file, anchor in re.findall(r"\]\(((?!http|mailto:)([^)#\s]*)#?([^)\s]*))\)", text(path)):
        target = path.parent / file if file else path
        assert target.exists(), link
        if anchor:  # made of the heading by GitHub's rule
            headings = re.findall(r"^#+ (.*)", target.read_text().lower(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}, link


@pytest.mark.parametrize("path", [*PAGES, *RECIPES], ids=lambda path: path.name)
def test_named_files_and_options_exist(path, options):
    # Not what begins elsewhere: open-instruct/scripts/..., site-packages/trl/scripts/...
    named = re.findall(r"(?<![\w/.-])(?:bench|configs|data|docs|recipes|scripts|sfm_dpo|tests)/[\w./-]*\w", text(path))
    named = [name for name in named if "mine" not in name and name != "scripts/site.sh"]
    assert not [name for name in named if not (ROOT / name).exists() and not (ROOT / "sfm_dpo" / name).exists()]
    assert not set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", text(path))) - options


def write_recipes() -> str:
    """The table of docs/recipes.md: fields of each recipe, and the GPUs for which its header computes."""
    lines = ["| recipe | model | data | lr, length, batch | GPUs |", "|---" * 5 + "|"]
    for recipe in RECIPES:
        given = yaml.safe_load(recipe.read_text())
        data = given.get("dataset_name") or given["datasets"][0]["path"]
        rate = f"{given['learning_rate']:g}".replace("e-0", "e-")
        sizes = f"{rate}, {given['max_length']:,}, {given['global_batch_size']}"
        found = re.search(r"^# Computed .* GiB on each of (.+), .* hours", recipe.read_text(), re.M)
        gpus = found[1] if found else "none"
        cells = (f"`{recipe.stem}`", given["model_name_or_path"], data, sizes, gpus)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write_measured() -> str:
    """The table of docs/memory-and-speed.md, from bench/results."""
    kinds = ("think", "instruct", "chat")
    files = {name: next(ROOT.glob(f"bench/results/2-core-*-olmo3-{name}-*.json")) for name in kinds}
    found = {name: json.loads(file.read_text())["summary"] for name, file in files.items()}
    lines = ["| variant | think / 8 | instruct / 8 | chat | peak GiB, think / 8 |", "|---|---|---|---|---|"]
    for variant, entry in found["think"].items():
        ratios = [f"{summary[variant]['epoch_pairs_per_second_ratio']:.2f}" for summary in found.values()]
        lines.append(f"| {variant} | {' | '.join(ratios)} | {entry['peak_memory_gib']:.2f} |")
    return "\n".join(lines) + "\n"


def write_measured_on_gpu() -> str:
    """The table of docs/memory-and-speed.md for a GPU, from bench/results."""
    [file] = ROOT.glob("bench/results/nvidia-h200-olmo3-think-*.json")
    summary = json.loads(file.read_text())["summary"]
    peak = peak_flops("NVIDIA H200")
    rows = {
        "pairs/s in training": lambda run: f"{run['pairs_per_second']:.3g}",
        "the same over stock TRL's": lambda run: f"{run['pairs_per_second_ratio']:.2f}",
        "with the reference pass": lambda run: f"{run['epoch_pairs_per_second_ratio']:.2f}",
        "tokens/s": lambda run: f"{run['tokens_per_second']:,.0f}",
        "FLOPs over those of a large product": lambda run: f"{run['mfu']:.1%}",
        "MFU (data sheet: 989 TFLOP/s)": lambda run: f"{run['flops'] / run['seconds'] / peak:.1%}",
        "peak GiB": lambda run: f"{run['peak_memory_gib']:.1f}",
    }
    lines = [f"| | {' | '.join(summary)} |", "|---" * (1 + len(summary)) + "|"]
    lines += [f"| {name} | {' | '.join(map(show, summary.values()))} |" for name, show in rows.items()]
    return "\n".join(lines) + "\n"


def write_migration() -> str:
    """The tables of docs/migration.md."""
    lines = []
    with MIGRATION.open(newline="") as file:
        for trainer, fields in groupby(csv.DictReader(file), itemgetter("trainer")):
            lines += [f"## From {trainer}", "", f"| {trainer} | here | remarks |", "|---|---|---|"]
            for row in fields:
                names = row["fields"].replace(", ", "`, `")
                here = f"`{row['here']}`" if row["here"] else "none"
                lines.append(f"| `{names}` | {here} | {row['remark']} |")
            lines.append("")
    return "\n".join(lines)


def write_reference() -> str:
    """The tables of docs/reference.md."""
    parser = FieldParser()
    types = {field.name: field.type for cls in DATACLASSES for field in dataclasses.fields(cls)}
    lines = [REFERENCE]
    for group, names in FIELD_GROUPS.items():
        lines += [f"\n## {group}\n", "| field | type | default | meaning | resume |", "|---|---|---|---|---|"]
        for name in names.split():
            choices = [str(choice) for choice in parser.fields[name].choices or () if choice != "best"]  # refused
            kind = getattr(types[name], "__name__", None) or str(types[name]).replace(" | None", "")
            if 0 < len(choices) < 9:
                kind = ", ".join(choices)
            default, meaning = parser.describe(name)
            may_change = "yes" if name in MAY_CHANGE else "no"
            lines.append(f"| `{name}` | {kind} | {default} | {meaning.replace('|', ',')} | {may_change} |")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "start", "end", "write"),
    [
        ("migration", "<!-- migration -->\n", "<!-- /migration -->", write_migration),
        ("recipes", "<!-- recipes -->\n", "<!-- /recipes -->", write_recipes),
        ("memory-and-speed", "<!-- measured -->\n", "<!-- /measured -->", write_measured),
        ("memory-and-speed", "<!-- gpu -->\n", "<!-- /gpu -->", write_measured_on_gpu),
        ("reference", "# Fields\n", "\n## Fields of TRL and Transformers", write_reference),
    ],
)
def test_generated_table(name, start, end, write):
    page = ROOT / f"docs/{name}.md"
    before, _, rest = page.read_text().partition(start)
    table, _, after = rest.partition(end)
    if os.environ.get("RECORD"):
        table = write()
        page.write_text(before + start + table + end + after)
    assert table == write(), "RECORD=1 pytest tests/scripts/test_docs.py writes it"


def test_every_field_of_ours_and_of_a_recipe_is_in_one_group_of_the_help():
    listed = [name for names in FIELD_GROUPS.values() for name in names.split()]
    used = {key for recipe in RECIPES for key in yaml.safe_load(recipe.read_text())}
    assert len(listed) == len(set(listed))
    assert set(TrainConfig.__annotations__) | used <= set(listed)


def test_exit_codes_are_those_of_the_code():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (ROOT / "docs/outputs.md").read_text(), re.M)
    ends = [error for kind in RunEnd.__subclasses__() for error in (kind, *kind.__subclasses__())]
    beside = {("0", "done"), ("1", "failed"), ("5", "push_failed"), (str(HUNG), "hung")}
    assert set(rows) == beside | {(str(end.exit_code), str(end.state)) for end in ends}
