"""A filter_script: leaves out pairs that share 13 words in a row with a question of a test set, and pairs with special
tokens in their texts, which the chat template would turn into its own."""

import json
import re

import datasets

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
WORDS = 13  # in lower case and without punctuation, as in GPT-3 and Tulu 3


def list_ngrams(text):
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


questions = datasets.load_dataset("openai/gsm8k", "main", split="test")["question"]
known = set().union(*map(list_ngrams, questions))


def keep(row):
    text = json.dumps(row, ensure_ascii=False, default=str)
    words = re.sub(r"\\[nrt]", " ", text)  # as JSON writes line breaks and tabs
    return not any(token in text for token in SPECIAL) and known.isdisjoint(list_ngrams(words))
