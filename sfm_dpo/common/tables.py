"""Tables in plain text."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest


def format_table(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), align: str = "l", indent: int = 2
) -> str:
    """The rows as lines of text. `align`: l or r for each column; the last one holds for all further columns."""
    table = [[str(cell) for cell in row] for row in rows]
    if headings:
        table.insert(0, list(headings))
    columns = []
    for i, column in enumerate(zip_longest(*table, fillvalue="")):
        width = max(map(len, column))
        is_right = align[min(i, len(align) - 1)] == "r"
        columns.append([cell.rjust(width) if is_right else cell.ljust(width) for cell in column])
    return "\n".join((" " * indent + "  ".join(cells)).rstrip() for cells in zip(*columns, strict=True))
