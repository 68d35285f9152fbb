"""Tables in plain text, aligned by rich."""

import io
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def format_table(
    rows: Iterable[Sequence[object]], headings: Sequence[str] = (), align: str = "l", indent: int = 2
) -> str:
    """The rows as lines of text, two spaces between columns.

    Args:
        headings: of the columns; none where empty.
        align: a letter a column, l or r; the last one stands for all further columns.
    """
    cells = [[str(cell) for cell in row] for row in ([headings, *rows] if headings else rows)]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for i in range(max(map(len, cells), default=0)):
        table.add_column(justify="right" if align[min(i, len(align) - 1)] == "r" else "left", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    Console(file=out, width=10_000, color_system=None, force_terminal=False).print(table)
    return "\n".join((" " * indent + line).rstrip() for line in out.getvalue().splitlines())
