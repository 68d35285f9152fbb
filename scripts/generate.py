#!/usr/bin/env python
"""Talk to a trained model, its base model beside it.

    python scripts/generate.py outputs/dpo                                   a prompt a line; Ctrl-D ends it
    python scripts/generate.py outputs/dpo "What is DPO?" "And PPO?"         answers to these prompts
    python scripts/generate.py my-org/my-model --base "" < prompts.txt       answers to lines, without a base model

MODEL is a run, a checkpoint, or any folder or Hub id of a model with a chat template. Each prompt begins a new chat.
Answers are greedy: the same each time.
"""

import sys
from pathlib import Path
from typing import Any

import _setup  # noqa: F401  (first: finds the package, reads .env)
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from sfm_dpo.common.cli import Arguments, command, number
from sfm_dpo.common.errors import UserError
from sfm_dpo.health.generation import continue_prompts, side_by_side
from sfm_dpo.model.loading import load_model
from sfm_dpo.run.folder import RESOLVED_CONFIG, read_resolved_config


@command
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--base", help="model beside it; default: what the run started from; empty: none")
    parser.add_argument("--max_new_tokens", type=number(int, 1), default=256)
    options = parser.parse_args(argv)
    disable_progress_bar()
    base = find_base(Path(options.model)) if options.base is None else options.base
    models = [load(name) for name in (base, options.model) if name]
    print(side_by_side("base", "trained") if base else options.model, flush=True)
    for prompt in options.prompts or sys.stdin:
        if prompt.strip():
            print(f"\nQ: {prompt.strip()}")
            answers = [answer(*model, prompt.strip(), options.max_new_tokens) for model in models]
            print(side_by_side(answers[0], answers[1]) if base else answers[0], flush=True)


def load(name: str) -> tuple[Any, Any]:
    """A model and its tokenizer."""
    on_gpu = torch.cuda.is_available()
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = load_model(name, {"dtype": "auto" if on_gpu else "float32"})  # bf16 is slow on CPU
    except (OSError, ValueError, StrictDataclassError) as error:
        raise UserError(f"{name}: neither a folder with a model nor one that the Hub gives: {error}") from error
    return model.to("cuda" if on_gpu else "cpu").eval(), tokenizer


def answer(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> str:
    chat = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    (found,) = continue_prompts(model, tokenizer, [ids], max_new_tokens)
    return found.text + (" ..." if found.cut else "")


def find_base(model: Path) -> str | None:
    """The base model of a run or checkpoint; None for another model."""
    for folder in (model, model.absolute().parent):
        if (folder / RESOLVED_CONFIG).is_file():
            return read_resolved_config(folder)["model_name_or_path"]
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
