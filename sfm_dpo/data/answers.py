"""How chosen and rejected answers differ, by source."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

CELLS = {
    "tokens": "{chosen:,.0f} / {rejected:,.0f}",
    "base margin": "{difference:+.3f}, above 0 in {chosen_more:.0%}",
}


def compare_sides(sources: np.ndarray, measures: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """For each of the 20 largest of the `sources` [N] its `pairs` and, of each measure (a key of CELLS; values of
    chosen and rejected [N, 2]), the means of both sides, their difference, and the share of pairs in which chosen has
    more."""
    rows = []
    for source, pairs in Counter(sources.tolist()).most_common(20):
        sides = {}
        for name, values in measures.items():
            mine = values[sources == source].astype(float)
            gap = mine[:, 0] - mine[:, 1]
            means = {"chosen": mine[:, 0].mean(), "rejected": mine[:, 1].mean(), "difference": gap.mean()}
            sides[name] = means | {"chosen_more": (gap > 0).mean()}
        rows.append({"source": source, "pairs": pairs, "sides": sides})
    return rows


def tabulate_sides(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of cells; the first row holds the headings."""
    table = [["source (chosen / rejected)", "pairs", *rows[0]["sides"]]]
    for row in rows:
        cells = [CELLS[name].format(**values) for name, values in row["sides"].items()]
        table.append([row["source"], f"{row['pairs']:,}", *cells])
    return table
