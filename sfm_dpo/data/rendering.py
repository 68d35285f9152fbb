"""From a pair of messages to text: the model's chat template, with the row's own tools and template arguments; and
where the results of tool calls are in it: they are context, not the model's words."""

import itertools
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.pairs import PARTS
from sfm_dpo.data.preferences import CALL_KEYS, TOOL_ROLES, read_calls

# What a template raises that refuses the roles, their order or the tools of a conversation
REFUSALS = (TemplateError, TypeError, ValueError, RecursionError)


def make_renderer(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    arguments = json.loads(pair.get("template") or "{}")

    def render(messages: list[dict[str, Any]], **options: Any) -> Any:
        return tokenizer.apply_chat_template(messages, tokenize=False, **arguments, **options)

    return render


def render_pair(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """The texts of prompt, prompt+chosen and prompt+rejected; None if the chat template refuses the row. `pair` keeps
    its tool calls under the name that the template reads."""
    if isinstance(pair["prompt"], str):
        eos = tokenizer.eos_token
        responses = [pair[side].removesuffix(eos) + eos for side in ("chosen", "rejected")]
        return [pair["prompt"], *(pair["prompt"] + response for response in responses)]
    if tokenizer.chat_template is None:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: its tokenizer has no chat template, but the data are "
            "conversations; put a chat_template.jinja into its folder"
        )
    try:
        for part in PARTS:
            pair[part] = [_name_calls(message, str(tokenizer.chat_template)) for message in pair[part]]
        prompt, chosen, rejected = (pair[part] for part in PARTS)
        render = make_renderer(pair, tokenizer)
        return [render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected)]
    except TemplateSyntaxError as error:
        where = f"model_name_or_path {tokenizer.name_or_path}: its chat template, line {error.lineno}"
        raise UserError(f"{where}: {error}") from error
    except REFUSALS:
        return None


def _name_calls(message: dict[str, Any], template: str) -> dict[str, Any]:
    """A message with `function_calls` as tool_calls, unless they are text that the template prints, as OLMo 3's."""
    calls = message.get("function_calls")
    is_printed = isinstance(calls, str) and "function_calls" in template
    if not calls or is_printed or "tool_calls" not in template:
        return message
    message = message | {"tool_calls": read_calls(calls)}
    del message["function_calls"]
    return message


def find_ignored(pair: dict[str, Any], template: str) -> list[str]:
    """The keys of IGNORED for tools and calls of a rendered pair that the chat template never mentions."""
    if isinstance(pair["prompt"], str):
        return []
    ignored = []
    if "tools" in json.loads(pair.get("template") or "{}") and "tools" not in template:
        ignored.append("tools")
    messages = [message for part in PARTS for message in pair[part]]
    if any(message.get(key) and key not in template for message in messages for key in CALL_KEYS):
        ignored.append("tool_calls")
    return ignored


def list_texts(pair: dict[str, Any], eos: str) -> list[str]:
    """Texts written by users or models: messages with their calls, or plain text without the EOS of a response."""
    if isinstance(pair["prompt"], str):
        return [pair["prompt"], pair["chosen"].removesuffix(eos), pair["rejected"].removesuffix(eos)]
    return [json.dumps(pair[part], ensure_ascii=False) for part in PARTS]


def find_tool_results(
    pair: dict[str, Any], texts: list[str], prompt_length: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """The column `masked` of a pair with rendered `texts`: tool results, and the header of the next turn, which the
    model does not write either. Raises TemplateError if the template changes a turn when others follow, and
    NotImplementedError for a tokenizer without offsets."""
    spans = []
    render = make_renderer(pair, tokenizer)
    for side, part in enumerate(("chosen", "rejected")):
        if all(message["role"] not in TOOL_ROLES for message in pair[part]):
            continue
        text = texts[1 + side]
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        token_begins = [begin for begin, _ in offsets]
        messages = pair["prompt"] + pair[part]
        end = 0
        for is_result, turns in itertools.groupby(messages, key=lambda message: message["role"] in TOOL_ROLES):
            begin = end
            end += len(list(turns))
            if is_result and end > len(pair["prompt"]):
                call = render(messages[:begin])
                if is_last_end := not text.startswith(call):  # OLMo 3's template ends only the last turn by EOS
                    call = call.removesuffix(tokenizer.eos_token)
                if not text.startswith(call) or not text.startswith(render(messages[:end])):
                    raise TemplateError("the template changes a turn when others follow")
                header = render(messages[:end], add_generation_prompt=True)
                # The model writes the token that ends the call
                span = (len(call) + is_last_end, common_prefix_length(header, text))
                spans.append([side, *(max(0, bisect_left(token_begins, at) - prompt_length) for at in span)])
    return spans


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
