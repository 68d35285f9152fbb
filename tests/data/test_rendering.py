"""How the two sides of pairs differ, against counts made by hand."""

import numpy as np

from sfm_dpo.data.rendering import compare_sides, tabulate_sides


def test_sides_are_compared_by_source():
    sources = np.array(["a"] * 10 + ["b"] * 4, dtype=object)
    tokens = np.stack([np.full(14, 30), np.full(14, 10)], axis=1)
    margin = np.stack([np.array([3] * 9 + [1] + [2] * 4), np.full(14, 2)], axis=1)
    rows = compare_sides(sources, {"tokens": tokens, "base margin": margin})
    found = rows[0]["sides"]["base margin"]
    assert found == {"chosen": 2.8, "rejected": 2.0, "difference": 0.8, "chosen_more": 0.9}
    assert tabulate_sides(rows) == [
        ["source (chosen / rejected)", "pairs", "tokens", "base margin"],
        ["a", "10", "30 / 10", "+0.800, above 0 in 90%"],
        ["b", "4", "30 / 10", "+0.000, above 0 in 0%"],
    ]
