"""From a pair of messages to text: the model's chat template, with the row's own tools and template arguments."""

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError, TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from sfm_dpo.common.errors import UserError
from sfm_dpo.data.pairs import PARTS

# What a template raises that refuses the roles, their order or the tools of a conversation
REFUSALS = (TemplateError, TypeError, ValueError)


def make_renderer(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """A function from messages to their text."""
    arguments = json.loads(pair.get("template") or "{}")
    return functools.partial(tokenizer.apply_chat_template, tokenize=False, **arguments)


def render_pair(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[str] | None:
    """The texts of prompt, prompt+chosen and prompt+rejected; None if the chat template refuses the row."""
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
        return _render_parts(pair, make_renderer(pair, tokenizer))
    except TemplateSyntaxError as error:
        where = f"model_name_or_path {tokenizer.name_or_path}: its chat template, line {error.lineno}"
        raise UserError(f"{where}: {error}") from error
    except REFUSALS:
        return None


def encode_sanitized(pair: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of prompt, prompt+chosen and prompt+rejected; special tokens of the messages are ordinary text."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_control_tokens = []  # only special tokens: a template's <think> stays a token
    render = make_renderer(pair, tokenizer)
    return _render_parts(
        pair, functools.partial(render, tokenize=True, sanitize_control_tokens=True, return_dict=False)
    )


def _render_parts(pair: dict[str, Any], render: Callable[..., Any]) -> list[Any]:
    prompt, chosen, rejected = (pair[part] for part in PARTS)
    return [render(prompt, add_generation_prompt=True), render(prompt + chosen), render(prompt + rejected)]


def list_texts(pair: dict[str, Any], eos: str) -> list[str]:
    """Texts written by users or models: messages with their calls, or plain text without the EOS of a response."""
    if isinstance(pair["prompt"], str):
        return [pair["prompt"], pair["chosen"].removesuffix(eos), pair["rejected"].removesuffix(eos)]
    return [json.dumps(pair[part], ensure_ascii=False) for part in PARTS]
