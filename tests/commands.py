"""The commands of PROGRAMS that the README and docs/ name, sorted by who runs them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROGRAMS = r"accelerate|git|hf|make|\S*pip|pytest|\S*python|sbatch|scancel|scontrol|source|torchrun|touch|trl|wandb"
COMMAND = re.compile(rf"(?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) \S.*)")
# Marks in the comment behind a command that is too much for a test
MARK = re.compile(r"# .*(\bGPUs?\b|\bminutes\b|\bhours?\b)")


def text(path: Path) -> str:
    """A page, or the comment at the top of a recipe, with each command on one line."""
    given = path.read_text()
    if path.suffix == ".yaml":
        given = "\n".join(line.removeprefix("#") for line in given.splitlines() if line.startswith("#"))
    return re.sub(r" *\\\n\s*", " ", given)


def commands() -> dict[str, str]:
    """Every command, in code blocks and in backticks, with its comment -> the page that says it first."""
    found: dict[str, str] = {}
    for page in PAGES:
        given = text(page)
        blocks = re.findall(r"^```\w*\n(.*?)^```", given, re.S | re.M) + re.findall(r"^ {4}(\S.*)$", given, re.M)
        prose = re.sub(r"^```.*?^```", "", given, flags=re.S | re.M)
        lines = [line for block in blocks for line in block.splitlines()]
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
        for line in lines:
            if match := COMMAND.fullmatch(line.strip()):
                found.setdefault(match[1], page.name)
    return found


def runnable(program: str, marked: bool = False) -> list[str]:
    """The commands of a program that bear a mark, or none, without their comments, each once."""
    lines = [re.split(r"\s+#", line)[0] for line in commands() if bool(MARK.search(line)) is marked]
    return sorted({line for line in lines if re.match(rf"(?:[A-Z_]+=\S+ )*(?:{program})\b", line)})


def blocks(language: str) -> list[tuple[str, str]]:
    """The code blocks of a language, none for commands and what they print: (name of the page, block)."""
    found = [(page.stem, re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.S | re.M)) for page in PAGES]
    return [(page, block) for page, given in found for kind, block in given if kind == language]
