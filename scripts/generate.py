#!/usr/bin/env python
"""Talk to a trained model, its base model beside it.

    python scripts/generate.py outputs/dpo                                   a chat in the terminal; Ctrl-D ends it
    python scripts/generate.py outputs/dpo "What is DPO?" "And PPO?"         answers to these prompts
    python scripts/generate.py my-org/my-model --base "" < prompts.txt       answers to lines, without a base model

MODEL is a run, a checkpoint, or any folder or Hub id of a model with a chat template. In a chat each model sees its
own earlier answers. Answers are greedy: the same each time.
"""

import sys
from pathlib import Path

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


class ChatModel:
    """A model with its tokenizer and its side of the conversation."""

    def __init__(self, name: str):
        device, dtype = ("cuda", "auto") if torch.cuda.is_available() else ("cpu", "float32")  # bf16 is slow on CPU
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = load_model(name, {"dtype": dtype})
        except (OSError, ValueError, StrictDataclassError) as error:
            raise UserError(f"{name}: neither a folder with a model nor one that the Hub gives: {error}") from error
        if not self.tokenizer.chat_template:
            raise UserError(f"{name}: its tokenizer has no chat template; take a model with one")
        self.model.to(device).eval()
        self.turns: list[dict[str, str]] = []

    def answer(self, prompt: str, max_new_tokens: int) -> str:
        self.turns.append({"role": "user", "content": prompt})
        ids = self.tokenizer.apply_chat_template(self.turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        (answer,) = continue_prompts(self.model, self.tokenizer, [ids], max_new_tokens)
        self.turns.append({"role": "assistant", "content": answer.text})
        return answer.text + (" ..." if answer.cut else "")


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
    models = [ChatModel(name) for name in (base, options.model) if name]
    chat = not options.prompts and sys.stdin.isatty()
    print(side_by_side("base", "trained") if base else options.model, flush=True)
    for prompt in map(str.strip, options.prompts or (iter(read_prompt, None) if chat else sys.stdin)):
        if not prompt:
            continue
        if not chat:
            print(f"\nQ: {prompt}")
            for model in models:
                model.turns.clear()
        answers = [model.answer(prompt, options.max_new_tokens) for model in models]
        print(side_by_side(answers[0], answers[-1]) if base else answers[0], flush=True)


def find_base(model: Path) -> str | None:
    """The base model of a run or checkpoint; None for another model."""
    for folder in (model, model.absolute().parent):
        if (folder / RESOLVED_CONFIG).is_file():
            return read_resolved_config(folder)["model_name_or_path"]
    return None


def read_prompt() -> str | None:
    """A prompt as it is typed; None at Ctrl-D."""
    try:
        return input("\n> ")
    except EOFError:
        return print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
