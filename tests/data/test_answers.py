"""Traits of answers, and how the two sides of pairs differ in them, against counts made by hand."""

import numpy as np
import pytest

from sfm_dpo.data.answers import compare_sides, find_traits, tabulate_sides

ANSWERS = {
    "declines": "I'm sorry, but I’m not able to discuss this.",
    "link": "See https://example.org or www.example.org.",
    "fenced block": "So:\n```python\nprint(1)\n```",
    "list": "Three:\n- one\n  2) two\n• three",
    "other script": "当然可以。1. Привет, мир",
}
PLAIN = ["", "A hyphen - here\n- and\n- there, `code`, a http word.", "Café, Ærø, Łódź, tiếng Việt.", "π = 3.14159"]
PLAIN += ["I can't help but smile at this, and I cannot help it.", "A doctor must decline it; a cat cannot help it."]


@pytest.mark.parametrize("name", ANSWERS)
def test_each_trait_is_found_in_the_answer_and_not_in_the_think_block(name):
    answers = [ANSWERS[name], f"<think>Hm.</think>{ANSWERS[name]}", f"<think>{ANSWERS[name]}</think>Yes.", *PLAIN]
    found = find_traits(answers)
    assert found[name] == [True, True] + [False] * 7
    assert not any(any(has) for other, has in found.items() if other != name)


def test_sides_are_compared_by_source():
    source = np.array(["a"] * 10 + ["b"] * 4, dtype=object)
    chosen = np.array([1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0], dtype=bool)
    rejected = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1], dtype=bool)
    tokens = np.stack([np.full(14, 30), np.full(14, 10)], axis=1)
    values = {"declines": (source, np.stack([chosen, rejected], axis=1)), "tokens": (source, tokens)}
    a, b = compare_sides(values)
    assert (a["source"], a["pairs"], b["source"], b["pairs"]) == ("a", 10, "b", 4)
    declines = a["sides"]["declines"]
    assert [declines[key] for key in ("chosen", "rejected", "chosen_more", "rejected_more")] == [0.9, 0.2, 0.8, 0.1]
    assert tabulate_sides([a, b])[1:] == [
        ["a", "10", "10.0%", "90.0% / 20.0%", "30 / 10"],
        ["b", "4", "25.0%", "0.0% / 25.0%", "30 / 10"],
    ]
    none = {"link": (source, np.zeros((14, 2), dtype=bool))}
    assert tabulate_sides(compare_sides(none | values)) == tabulate_sides([a, b]), "no column of zeros"
