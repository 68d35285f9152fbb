"""What the analysis finds, misses and names falsely, in 20,000 generated pairs with planted faults.

    python bench/planted_faults.py [--pairs 20000] [--write pairs.jsonl]

The texts are sentences of the Python documentation that comes with Python. A hundredth of the pairs gets each fault; a
hundredth gets each of DECOYS, which only look like one. Prints the table of docs/filters.md. What is counted as named
falsely are pairs without the fault, other planted ones and decoys included.
"""

import argparse
import json
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import sfm_dpo

sfm_dpo.setup()

import numpy as np

from sfm_dpo.data.contamination import NGRAM, report_contamination
from sfm_dpo.data.faults import CHECKS, find_faults
from sfm_dpo.data.filters import hash_ngrams, hash_words, judge_texts, measure_texts
from sfm_dpo.data.preferences import normalize_rows
from sfm_dpo.data.sources import load_rows

REFUSALS = [
    "I'm sorry, but I can't help with that request.",
    "I cannot provide instructions for this.",
    "I'm unable to assist with that topic.",
    "As an AI language model, I do not have personal opinions.",
    "I must decline to answer this question.",
    "I won't generate that kind of text.",
    "I'd rather not talk about this.",
    "That is something I prefer to stay away from.",
]
TAGS = ["<|im_end|>", "\n\nHuman: And then?", "\n\nAssistant: Well.", "[/INST]", "<|eot_id|>", "\n\nUSER: And then?"]
EMOJI = ["\U0001f600", "\U0001f680", "\u2728"]


def markdown(rng: random.Random, text: str) -> str:
    first, *rest = sentences_of(text)
    return rng.choice(
        [
            f"## Answer\n\n{text}",
            "\n".join(f"- {line}" for line in (first, *rest)),
            f"**{first}** {' '.join(rest)}",
            f"{first}\n```\nx = 1\n```\n{' '.join(rest)}",
        ]
    )


def damage(rng: random.Random, text: str) -> str:
    """As UTF-8 is when it is read in another encoding."""
    text = text.replace("e", "é", 2).replace("'", "’")
    return text.encode().decode(rng.choice(["latin-1", "cp1252"]), "replace")


def sentences_of(text: str) -> list[str]:
    return re.split(r"(?<=\.) ", text)


def reword(rng: random.Random, text: str, share: float, words: list[str]) -> str:
    return " ".join(rng.choice(words) if rng.random() < share else word for word in text.split())


# (what, of a pair: prompt, chosen, rejected -> the same with the fault); those that need other rows are in `plant`
SIDED = {
    "refusal": lambda rng, text: f"{rng.choice(REFUSALS)} {text}",
    "cut": lambda rng, text: text[: rng.randrange(len(text) * 2 // 3, len(text) - 2)],
    "markdown": markdown,
    "emoji": lambda rng, text: f"{text} {rng.choice(EMOJI)}",
    "role_tag": lambda rng, text: text + rng.choice(TAGS),
    "bad_think": lambda rng, text: rng.choice(["<think>\n</think>\n", "<think>"]) + text,
    "mojibake": damage,
}
# Rows with the second fault may well have the first
ALSO = {"paraphrase": "contamination", "contamination": "paraphrase"}
ALSO |= {"duplicate pair": "near-duplicate pair", "duplicate prompt": "near-duplicate pair"}
DECOYS = [
    lambda rng, text: f"I'm sorry to hear that it does not work. {text}",
    lambda rng, text: f"I can't say that I like it. {text}",
    lambda rng, text: f"{text}\n\nSee https://docs.python.org/3/library/{rng.randrange(99)}",
    lambda rng, text: f"{text} 2 * 3 * 4 = 24, as a human: one who counts, and the assistant: his computer, say.",
    lambda rng, text: f"Größe, naïve, señor, “so” and ‘so’: {text}",
    lambda rng, text: f"<think>{text}</think>\nYes.",
    lambda rng, text: text + "\n\nWith kind regards\nA. Turing",
    lambda rng, text: text + "\nThe list of names has: Anna, Bert, Carla, Dora, Emil, and, as the last of them, Fritz",
]


def generate(n: int, seed: int = 0) -> tuple[list[dict], dict[str, set[int]], list[str]]:
    """Pairs, the rows that have each fault, and the rows of an evaluation set."""
    rng = random.Random(seed)
    text = " ".join(" ".join(topics.values()).split())
    found = {s for s in sentences_of(text) if re.fullmatch(r"[A-Z][\w ,;()'-]{50,240}\.", s)}
    sentences = sorted(found)
    rng.shuffle(sentences)
    words = sorted({word for s in sentences for word in re.findall("[a-z]+", s)})
    grams = {s: set(hash_ngrams([hash_words(s)], NGRAM)[0].tolist()) for s in sentences}
    often = Counter(gram for known in grams.values() for gram in known)  # sentences that the documentation repeats
    held = [s for s in sentences if grams[s] and all(often[gram] == 1 for gram in grams[s])][:100]
    free = [s for s in sentences if s not in set(held)]

    def write(least: int, most: int) -> str:
        return " ".join(rng.sample(free, rng.randint(least, most)))

    rows = [
        {"prompt": f"Explain text {i}: {write(2, 3)}", "chosen": write(3, 7), "rejected": write(3, 7)}
        for i in range(n)
    ]
    kinds = [*SIDED, "same_start", "repeats_prompt", "near-identical responses", "contamination", "paraphrase"]
    kinds += ["duplicate pair", "near-duplicate pair", "duplicate prompt", "decoy"]
    order, planted = list(range(n // 2, n)), {}
    rng.shuffle(order)
    for k, kind in enumerate(kinds):
        planted[kind] = set(order[k * (n // 100) : (k + 1) * (n // 100)])
        for i in sorted(planted[kind]):
            row, side = rows[i], rng.choice(["chosen", "rejected"])
            earlier = rows[rng.randrange(n // 2)]
            if kind in SIDED or kind == "decoy":
                change = SIDED.get(kind) or rng.choice(DECOYS)
                row[side] = change(rng, row[side])
            elif kind == "same_start":
                row["rejected"] = f"{row['chosen'][:220]} {row['rejected']}"
            elif kind == "repeats_prompt":
                row[side] = f"{row['prompt']} {row[side]}"
            elif kind == "near-identical responses":
                row["rejected"] = reword(rng, row["chosen"], 0.005, words) + " Indeed."
            elif kind == "contamination":
                row[rng.choice(list(row))] += " " + rng.choice(held)
            elif kind == "paraphrase":
                row["prompt"] += " " + " ".join(
                    rng.choice(words) if j % 6 == 5 else word for j, word in enumerate(rng.choice(held).split())
                )
            elif kind == "duplicate prompt":
                row["prompt"] = earlier["prompt"]
            else:
                share = 0.02 if kind.startswith("near") else 0
                row |= {name: reword(rng, value, share, words) for name, value in earlier.items()}
    planted["same_start"] |= {
        i for i in planted["near-identical responses"] if rows[i]["chosen"][:200] == rows[i]["rejected"][:200]
    }
    return rows, planted, held


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--write", type=Path, help="writes the pairs as well")
    args = parser.parse_args(argv)
    rows, planted, held = generate(args.pairs)
    with tempfile.TemporaryDirectory() as folder:
        file, against = Path(folder) / "pairs.jsonl", Path(folder) / "evaluation.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        against.write_text("".join(json.dumps({"question": text}) + "\n" for text in held))
        if args.write:
            args.write.write_text(file.read_text())
        pairs, dropped = normalize_rows(load_rows(str(file)), "generated", 2)
        assert not dropped
        measures, faults = measure_texts(pairs, 2)[:], find_faults(pairs, 2)
        shared = report_contamination(pairs, measures["pair_key"], [str(against)], NGRAM, 2)
    named = {name: set(np.flatnonzero(faults[name]).tolist()) for name in CHECKS}
    named["contamination"] = named["paraphrase"] = {row["row"] for row in shared["pairs"]}

    def judged(reason: str, **setting) -> set[int]:
        return set(np.flatnonzero(judge_texts(measures, **setting) == reason).tolist())

    named["near-identical responses"] = judged("responses_alike", max_response_similarity=0.95)
    named["duplicate pair"] = judged("duplicate", drop_duplicates="pairs")
    near = {"drop_duplicates": "pairs", "duplicate_threshold": 0.6}
    named["near-duplicate pair"] = judged("near_duplicate", **near)
    named["duplicate prompt"] = judged("duplicate", drop_duplicates="prompts") - named["duplicate pair"]
    table = []
    for kind, have in planted.items():
        if kind != "decoy":
            wrong = named[kind] - have - planted.get(ALSO.get(kind, ""), set())
            table.append(
                [f"| {kind}", *map(str, (len(have), len(named[kind] & have), len(have - named[kind]), len(wrong)))]
            )
    print(
        "\n".join(
            " | ".join(row) + " |" for row in [["| fault", "planted", "found", "missed", "named falsely"], *table]
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
