"""From a pair of messages to text: the model's chat template, with the row's own tools and template arguments; and
where the results of tool calls are in it: they are context, not the model's words."""

import itertools
import json
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils
from trl.data_utils import common_prefix_length

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.pairs import HISTORY, PARTS
from sfm_dpo.data.preferences import TOOL_ROLES, read_calls

# What a template raises that refuses the roles, their order or the tools of a conversation
REFUSALS = (TemplateError, TypeError, ValueError, RecursionError)
LABELS = ("role", "type", "id", "tool_call_id", "index")  # keys whose values link parts of a message; no text


def frozen_clock(date: str | None) -> AbstractContextManager:
    """For code that renders: strftime_now of a chat template tells midnight of `date` (YYYY-MM-DD)."""
    # Upstream: transformers 5.24, utils/chat_template_utils.py, strftime_now: tells the machine's time, so a resume on
    # the next day reads other tokens, and it cannot be passed to the template. Canary: test_canary_template_clock
    midnight = datetime.fromisoformat(date) if date else datetime.now()
    return mock.patch.object(chat_template_utils, "datetime", SimpleNamespace(now=lambda: midnight))


def make_renderer(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    arguments = json.loads(pair.get("template") or "{}")
    return partial(tokenizer.apply_chat_template, tokenize=False, **arguments)


def render_pair(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str] | str:
    """The texts of prompt, prompt+chosen and prompt+rejected, or the reason why there are none, as in drop_rows.
    `pair` keeps its tool calls under the name that the template reads."""
    if isinstance(pair["prompt"], str):
        eos = tokenizer.eos_token
        responses = [pair["chosen"], pair["rejected"]]
        ended = [text if text.rstrip().endswith(eos) else text + eos for text in responses]
        return [pair["prompt"], *(pair["prompt"] + text for text in ended)]
    if tokenizer.chat_template is None:
        raise UserError(
            f"model_name_or_path {tokenizer.name_or_path}: its tokenizer has no chat template, but the data are "
            "conversations; put a chat_template.jinja into its folder"
        )
    try:
        for part in PARTS:
            pair[part] = [_name_calls(message, str(tokenizer.chat_template)) for message in pair[part]]
        prompt, chosen, rejected = (pair[part] for part in PARTS)
        if prompt[-1]["role"] == "assistant" and "assistant" in (chosen[0]["role"], rejected[0]["role"]):
            return "prefill"
        render = make_renderer(pair, tokenizer)
        return [render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected)]
    except TemplateSyntaxError as error:
        where = f"model_name_or_path {tokenizer.name_or_path}: its chat template, line {error.lineno}"
        raise UserError(f"{where}: {error}") from error
    except REFUSALS as error:
        return f"refused: {' '.join(str(error).split())[:200]}"


def _name_calls(message: dict[str, Any], template: str) -> dict[str, Any]:
    """A message with `function_calls` as tool_calls, unless they are text that the template prints, as OLMo 3's."""
    calls = message.get("function_calls")
    is_printed = isinstance(calls, str) and "function_calls" in template
    if not calls or is_printed or "tool_calls" not in template:
        return message
    message = message | {"tool_calls": read_calls(calls)}
    del message["function_calls"]
    return message


def find_unprinted(pair: dict[str, Any], texts: list[str]) -> set[str]:
    """`key:part` for each key of messages, and for tools, with a text that the rendered `texts` lack."""
    found: set[str] = set()
    if isinstance(pair["prompt"], str):
        return found
    for tool in json.loads(pair.get("template") or "{}").get("tools") or []:
        function = tool.get("function", tool)
        is_mapping = isinstance(function, dict)  # or, for instance, JSON text
        if not is_printed([function.get("name"), function.get("description")] if is_mapping else function, texts[0]):
            found.add("tools:prompt")
    for part, text in zip(PARTS, texts, strict=True):
        before = "" if part == "prompt" else texts[0]
        if not text.startswith(before):  # the generation prompt may open a thought
            before = before[: common_prefix_length(before, text)]
        for message in pair[part]:
            is_history = part == "prompt" and message["role"] == "assistant"
            missing = [key for key in message.keys() - LABELS if not is_printed(message[key], text, before)]
            found |= {f"{''.join(key.split())}:{HISTORY if is_history else part}" for key in missing}
    return found


def is_printed(value: Any, rendered: str, before: str = "") -> bool:
    """Whether a rendered text has all texts in a value of JSON, after its beginning `before`."""
    if isinstance(value, dict):
        return all(is_printed(value[key], rendered, before) for key in value.keys() - LABELS)
    if isinstance(value, list):
        return all(is_printed(item, rendered, before) for item in value)
    text = value.strip() if isinstance(value, str) else ""
    if not text or rendered.count(text) > before.count(text):
        return True
    # Templates write texts as JSON, and change white space, as a rule around thoughts
    forms = [text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]]
    rendered, before, *forms = ("".join(each.split()) for each in (rendered, before, *forms))
    return any(rendered.count(form) > before.count(form) for form in forms)


def list_texts(pair: dict[str, Any], eos: str) -> list[str]:
    """Texts written by users or models: messages with their calls, or plain text without the EOS of a response."""
    if isinstance(pair["prompt"], str):
        return [pair["prompt"], *(pair[side].rstrip().removesuffix(eos) for side in ("chosen", "rejected"))]
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
