"""Where the results of tool calls are in the tokens of a response: they are context, not the model's words."""

import itertools
from bisect import bisect_left
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.data_utils import common_prefix_length

from sfm_dpo.data.preferences import TOOL_ROLES
from sfm_dpo.data.rendering import make_renderer


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
