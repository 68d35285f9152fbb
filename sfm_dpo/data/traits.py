"""How chosen and rejected answers differ, by source; docs/lengths.md has each trait and its measured precision."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

# Searched only in the first 160 characters: later, "cannot help" may be part of an answer
_DECLINES = re.compile(
    r"\A.{0,160}?\b(?:"
    r"I(?: can ?not| can['’]t| won['’]t| will not|(?:['’]m| am) (?:unable|not able) to) "
    r"(?:help(?! (?:but|it)\b)|assist|provide|comply|answer|fulfill?|discuss|engage|create|write|generate|give|"
    r"support|participate|continue|offer|suggest|encourage|promote|recommend|condone|do (?:that|this))\b|"
    r"I must (?:decline|refuse)\b|I(?:['’]m| am) not comfortable\b|I (?:do not|don['’]t) condone\b)",
    re.DOTALL | re.IGNORECASE,
)
_OTHER_LETTER = re.compile(r"[^\W\d_A-Za-zªºÀ-ÖØ-öø-ɏḀ-ỿ]")  # letters that are not Latin
# For each trait: a predicate on an answer without its think block, and a phrase that describes the trait
TRAITS: dict[str, tuple[Callable[[str], Any], str]] = {
    "declines": (_DECLINES.search, "declines"),
    "link": (re.compile(r"https?://\w|\bwww\.\w").search, "has a link"),
    "fenced block": (re.compile(r"```.*```", re.DOTALL).search, "has a fenced block"),
    "list": (lambda text: len(re.findall(r"^[ \t]*(?:[-*+•]|\d+[.)])[ \t]+\S", text, re.M)) >= 3, "has a list"),
    "other script": (lambda text: 3 * len(_OTHER_LETTER.findall(text)) > len(text), "is in a non-Latin script"),
}
SIDES = ("chosen", "rejected")
CELLS = dict.fromkeys(TRAITS, "{chosen:.1%} / {rejected:.1%}") | {
    "tokens": "{chosen:,.0f} / {rejected:,.0f}",
    "base margin": "{difference:+.3f}, above 0 in {chosen_more:.0%}",
}


def find_traits(answers: Sequence[str]) -> dict[str, list[bool]]:
    """For each of TRAITS, whether each answer has it."""
    texts = [answer.rpartition("</think>")[2] for answer in answers]
    return {name: [bool(has(text)) for text in texts] for name, (has, _) in TRAITS.items()}


def compare_sides(values: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> list[dict[str, Any]]:
    """For each of the 20 largest sources its `pairs` and, by trait or measure, the means of both sides, their
    difference, the share of pairs in which each side has more, and `z`, the difference in standard errors (McNemar).

    `values`: by trait or measure, the sources of N pairs [N] and the values of chosen and rejected [N, 2]. Traits may
    cover only a sample, so `pairs` counts those of the last measure."""
    sources, _ = min(values.values(), key=lambda value: len(value[0]))
    rows = []
    for source, _ in Counter(sources.tolist()).most_common(20):
        sides = {}
        for name, (source_of, both) in values.items():
            mine = both[source_of == source].astype(float)
            gap = mine[:, 0] - mine[:, 1]
            means = {"chosen": mine[:, 0].mean(), "rejected": mine[:, 1].mean(), "difference": gap.mean()}
            shares = {"chosen_more": (gap > 0).mean(), "rejected_more": (gap < 0).mean()}
            sides[name] = means | shares | {"z": gap.sum() / max(np.sqrt((gap**2).sum()), 1e-9)}
        rows.append({"source": source, "pairs": len(gap), "sides": sides})
    return rows


def tabulate_sides(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of cells; the first row holds the headings. A trait that no answer has is left out."""
    names = [name for name in rows[0]["sides"] if any(row["sides"][name][side] for row in rows for side in SIDES)]
    table = [["source (chosen / rejected)", "pairs", "only rejected declines", *names]]
    for row in rows:
        cells = [CELLS[name].format(**row["sides"][name]) for name in names]
        table.append([row["source"], f"{row['pairs']:,}", f"{row['sides']['declines']['rejected_more']:.1%}", *cells])
    return table


def describe_sides(rows: list[dict[str, Any]]) -> list[str]:
    """The five most one-sided differences as sentences; 3 standard errors occur by chance in one case of 370."""
    found = []
    for row in rows:
        for name, side in row["sides"].items():
            text = "has {chosen:,.0f} tokens on average, the rejected {rejected:,.0f}"
            if name in TRAITS:
                text = TRAITS[name][1] + " in {chosen:.1%} of the pairs, the rejected in {rejected:.1%}"
            found.append((abs(side["z"]), f"in {row['source']}, the chosen answer {text.format(**side)}"))
    return [text for z, text in sorted(found, reverse=True)[:5] if z >= 3]
