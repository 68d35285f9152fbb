#!/usr/bin/env python
"""Chats with a trained model and with its base model. Each prompt starts a new chat; decoding is greedy.

python scripts/generate.py outputs/dpo                               reads a prompt per line; Ctrl-D ends it
python scripts/generate.py outputs/dpo "What is DPO?" "And PPO?"     answers these prompts
python scripts/generate.py my-org/my-model < prompts.txt             answers each line; no base model is known
"""

import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import torch
from transformers import AutoTokenizer

from sfm_dpo.common.cli import Arguments, command, number, reads_runs
from sfm_dpo.common.errors import explain_path, user_input
from sfm_dpo.health.guard import continue_prompts
from sfm_dpo.model.loading import load_model
from sfm_dpo.run.saved_model import find_model, find_run


@command
@reads_runs
def main(argv: list[str]) -> None:
    parser = Arguments(description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="a run, a checkpoint, or the folder or Hub id of a chat model")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT")
    parser.add_argument("--max_new_tokens", type=number(int, 1), default=256)
    options = parser.parse_args(argv)
    models = {}
    if find_run(Path(options.model)):
        trained = find_model(Path(options.model))
        models["base"] = load(trained.base, trained.base_revision)
    models["trained"] = load(options.model)
    for prompt in options.prompts or sys.stdin:
        if prompt.strip():
            print(f"\nprompt: {prompt.strip()}")
            chat = [{"role": "user", "content": prompt.strip()}]
            for label, (model, tokenizer) in models.items():
                if tokenizer.chat_template:
                    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
                else:  # trained on plain text
                    inputs = tokenizer(prompt.strip())
                (answer,) = continue_prompts(model, tokenizer, [inputs["input_ids"]], options.max_new_tokens)
                print(f"{label}: {answer}", flush=True)


def load(name: str, revision: str | None = None) -> tuple:
    dtype = "auto" if torch.cuda.is_available() else "float32"  # bf16 is slow on CPU
    with user_input(f"{name}: neither a folder with a model nor a model on the Hub", explain_path(name)):
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # Llama's has none
    return load_model(name, {"dtype": dtype, "revision": revision}).eval(), tokenizer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
