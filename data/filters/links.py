"""A filter_script: leaves out chosen answers with a link that the prompt does not have, and pairs that prefer to
comply where the other answer declines."""

import re


def read_text(part):  # a text, messages, a message, its content
    if isinstance(part, list):
        return " ".join(map(read_text, part))
    return read_text(part.get("content") or part.get("text")) if isinstance(part, dict) else part or ""


def read_answer(side):
    return read_text(side[-1:] if isinstance(side, list) else side)


def keep(row):
    known = read_text(row.get("prompt") or row["rejected"])
    links = re.findall(r"https?://[^\s)\]]+", read_answer(row["chosen"]))
    declines = re.match(r"I['’]m sorry|I can['’]t|I cannot|I won['’]t", read_answer(row["rejected"]))
    return not declines and all(link.rstrip(".,;:!?") in known for link in links)
