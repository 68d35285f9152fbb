"""Prints a canary as one file without this project, to report its bug upstream:

python -m tests.upstream_script test_canary_num_tokens >test_bug.py
pytest test_bug.py      # passes as long as the bug is there
"""

import ast
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def extract(canary: str) -> str:
    """The test with the imports, helpers and fixtures that it uses. Raises ImportError if one of them is sfm_dpo's."""
    [path] = [path for path in TESTS.rglob("test_*.py") if f"\ndef {canary}(" in path.read_text()]
    imports: dict[str, None] = {}  # in the order of their first use
    parts: dict[str, None] = {}
    _add(canary, path, imports, parts)
    return "\n".join(sorted(imports)) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _add(name: str, path: Path, imports: dict[str, None], parts: dict[str, None]) -> None:
    """Adds what `name` means in the module, after all that it uses itself."""
    source = path.read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name.partition(".")[0]):
                    _add_import(node, alias, imports, parts)
        elif name in _names_defined(node):
            start = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            part = "\n".join(source.splitlines()[start - 1 : node.end_lineno])
            if part not in parts:
                names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
                local = {inner.id for inner in names if isinstance(inner.ctx, ast.Store)}
                fixtures = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
                for other in sorted({inner.id for inner in names} - local | fixtures - {name}):
                    _add(other, path, imports, parts)
                parts[part] = None


def _add_import(node: ast.Import | ast.ImportFrom, alias: ast.alias, imports: dict, parts: dict) -> None:
    module = node.module if isinstance(node, ast.ImportFrom) else alias.name
    if module.startswith("tests."):
        _add(alias.name, TESTS.parent / f"{module.replace('.', '/')}.py", imports, parts)
    elif module.startswith("sfm_dpo"):
        raise ImportError(f"it uses {module}.{alias.name}")
    else:
        imports[ast.unparse(type(node)(**vars(node) | {"names": [alias]}))] = None


def _names_defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


if __name__ == "__main__":
    print(extract(sys.argv[1]), end="")
