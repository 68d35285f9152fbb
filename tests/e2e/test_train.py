"""train_dpo.py as a user starts it: what a run leaves behind, and what a second start does.

Runs in this process through `train_dpo.main` where nothing is lost by it, and as real commands where something is.
Mistakes: tests/scripts/test_bad_inputs.py, tests/test_config.py.
"""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from sfm_dpo.config_checks import EVAL_METRICS

ROOT = Path(__file__).parents[2]
FILES = """README.md config.json data.json environment.json model.safetensors resolved_config.yaml status.json
    tokenizer.json tokenizer_config.json trainer_state.json""".split()


def prompt_rows() -> list[dict]:
    """The shape of Dolci-Think: `prompt` text, responses as message lists, a column that is not ours."""
    draw = random.Random(0)
    return [
        {
            "id": i,
            "prompt": f"Wie viele Äpfel? {i} " + "bitte " * draw.randrange(8),
            "chosen": [{"role": "assistant", "content": "two " * draw.randrange(1, 12)}],
            "rejected": [{"role": "assistant", "content": "I cannot say " * draw.randrange(1, 6)}],
        }
        for i in range(24)
    ]


def arguments(model, data, out, *more: str) -> list[str]:
    """A CPU run of a few steps of 4 pairs."""
    return [
        *("--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out), "--use_cpu"),
        *("--global_batch_size", "4", "--per_device_train_batch_size", "2", "--max_length", "256"),
        *("--learning_rate", "1e-4", "--logging_steps", "1"),
        *("--preflight", "warn", "--guard", "warn", *more),  # random weights find every answer impossible
    ]


def run_command(*args: str, launcher: tuple[str, ...] = (), **env: str) -> tuple[int, str]:
    """Exit code and output of train_dpo.py in a process group of its own, which ends with the test."""
    process = subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train_dpo.py"), *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=240)[0]
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def losses(run: Path) -> list[float]:
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def assert_trained(run: Path, base: Path) -> None:
    """The contract of DESIGN for a finished run."""
    present = {path.name for path in run.iterdir()}
    assert present >= set(FILES), set(FILES) - present
    assert [path for path in run.glob("checkpoint-*/trainer_state.json")]
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("done", 0)
    assert losses(run)[0] == pytest.approx(math.log(2), abs=1e-4)
    assert all(math.isfinite(loss) for loss in losses(run))
    assert status["step"] == len(losses(run))

    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    after, info = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
    tokenizer = AutoTokenizer.from_pretrained(run)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], return_tensors="pt")["input_ids"]
    assert after(input_ids=ids).logits.isfinite().all()
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template


def test_trains_to_a_documented_model_and_refuses_another_run(tiny_folder, write_rows, tmp_path, capsys):
    base, run, data = tiny_folder("olmo3"), tmp_path / "run", write_rows("pairs.jsonl", prompt_rows())
    assert train_dpo.main(arguments(base, data, run)) == 0
    assert_trained(run, base)
    assert len(losses(run)) == 6

    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train_dpo.main(arguments(base, data, run, "--seed", "7")) == 2
    assert "seed is 42 there, 7 here" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_held_out_sets_are_scored_apart_and_the_best_checkpoint_is_the_model(
    tiny_folder, write_rows, tmp_path, capsys
):
    """One of the named sets is the other with its sides swapped: by its loss the first checkpoint is the best."""
    rows, run = prompt_rows(), tmp_path / "run"
    few = write_rows("few.jsonl", rows[:7])
    swapped = write_rows("swapped.jsonl", [r | {"chosen": r["rejected"], "rejected": r["chosen"]} for r in rows[:7]])
    sets = json.dumps({"few": {"path": str(few), "split": "train"}, "swapped": str(swapped)})
    rows += [rows[0] | {"rejected": rows[0]["chosen"]}, rows[1] | {"prompt": "long " * 100}]
    rows += [rows[2] | {"chosen": [{"role": "assistant", "content": " "}]}]
    more = ["--eval_fraction", "0.25", "--num_train_epochs", "4", "--learning_rate", "1e-3"]
    more += ["--max_dropped_fraction", "0.2", "--precompute_ref_log_probs", "true", "--eval_datasets", sets]
    more += ["--eval_strategy", "steps", "--eval_steps", "4", "--save_steps", "4", "--load_best_model_at_end"]
    more += ["--metric_for_best_model", "eval_swapped_loss"]
    argv = arguments(tiny_folder("gpt_neox"), write_rows("p.jsonl", rows), run, *more)
    assert train_dpo.main(argv) == 0
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    scores = [(entry["step"], entry["eval_rewards/accuracies"]) for entry in history if "eval_loss" in entry]
    assert scores[0] == (0, 0.5)
    assert scores[-1][0] == 16 and scores[-1][1] > 0.7
    data = json.loads((run / "data.json").read_text())
    assert (data["rows"], data["train"], data["eval"]) == (27, 18, 6)
    assert data["eval_sets"] == {"few": 7, "swapped": 7}
    assert data["reference"].keys() == {"train", "eval", "few", "swapped"}
    assert data["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1, "prompt_too_long": 1}
    out = capsys.readouterr().out
    assert "held out at step 0" in out
    assert "swapped at step 16" in out and "pairs held out: few" in out
    assert "dropped: empty response" in out and "dropped: prompt leaves no room" in out

    few, swapped = ([e for e in history if f"eval_{name}_loss" in e] for name in ("few", "swapped"))
    assert [e["step"] for e in few] == [e["step"] for e in swapped] == [0, 4, 8, 12, 16]
    assert {name.removeprefix("eval_few_") for name in few[0] if name.startswith("eval_")} >= set(EVAL_METRICS)
    for one, other in zip(few[1:], swapped[1:], strict=True):
        assert one["eval_few_rewards/margins"] == pytest.approx(-other["eval_swapped_rewards/margins"], rel=1e-4)
        assert one["eval_few_rewards/accuracies"] == pytest.approx(1 - other["eval_swapped_rewards/accuracies"])
    best = min(swapped[1:], key=lambda e: e["eval_swapped_loss"])
    assert best["step"] == 4, "the best checkpoint must be one that rotation would delete"
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-12", "checkpoint-16"}
    weights = {step: (run / f"checkpoint-{step}/model.safetensors").read_bytes() for step in (4, 16)}
    assert weights[4] != weights[16] and (run / "model.safetensors").read_bytes() == weights[4]
    named = {"checkpoint": str(run / "checkpoint-4"), "step": 4, "metric": "eval_swapped_loss"}
    assert json.loads((run / "status.json").read_text())["best"] == named | {"value": best["eval_swapped_loss"]}
    sentence = f"The best checkpoint by eval_swapped_loss, {best['eval_swapped_loss']:.4f}, is that of step 4; the"
    for page in ("README.md", "report.html"):
        text = (run / page).read_text()
        assert sentence in text and "7 pairs of swapped" in text
        assert f"| loss | 0.693 | {best['eval_swapped_loss']:.3f} |" in text or page != "README.md"

    damaged = bytearray(weights[4])
    damaged[-1] ^= 1
    (run / "checkpoint-4/model.safetensors").write_bytes(damaged)
    (run / "status.json").write_text(json.dumps({"state": "stopped", "time": ""}))
    assert train_dpo.main(argv) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and "checkpoint-4 has a damaged model.safetensors" in error[0]
    assert train_dpo.main([*argv, "--load_best_model_at_end", "false"]) == 0
    assert (run / "model.safetensors").read_bytes() == weights[16]


def test_as_a_command_with_a_recipe_spaces_and_secrets(tiny_folder, write_rows, tmp_path):
    """The command itself: precedence, a folder with a space, no secret in anything it leaves or says, DONE."""
    data = write_rows("two words ü/pairs.jsonl", prompt_rows())
    run, recipe = tmp_path / "my run", tmp_path / "my recipe.yaml"
    fields = {"model_name_or_path": str(tiny_folder("gpt_neox")), "dataset_name": str(data), "output_dir": str(run)}
    fields |= {
        "use_cpu": True,
        "global_batch_size": 8,
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "hub_token": "hf_canary_recipe",
        "preflight": "warn",  # random weights find every answer impossible
    }
    recipe.write_text(yaml.safe_dump(fields))
    args = ["--config", str(recipe), "--per_device_train_batch_size", "4"]
    secrets = {"HF_TOKEN": "hf_canary_env", "WANDB_API_KEY": "wandb_canary"}
    code, output = run_command(*args, **secrets)
    assert code == 0, output
    assert_trained(run, tiny_folder("gpt_neox"))
    resolved = yaml.safe_load((run / "resolved_config.yaml").read_text())
    assert (resolved["per_device_train_batch_size"], resolved["gradient_accumulation_steps"]) == (4, 2)
    assert "canary" not in output
    for path in run.rglob("*"):
        assert path.is_dir() or b"canary" not in path.read_bytes(), path

    weights = (run / "model.safetensors").stat().st_mtime_ns
    code, output = run_command(*args, **secrets)
    assert code == 0 and "already done" in output and "Loading weights" not in output
    assert (run / "model.safetensors").stat().st_mtime_ns == weights


def test_two_processes_stop_together_where_the_guard_says_so(tiny_folder, write_rows, tmp_path):
    """Preflight on two ranks without a cache, then a collapse: no rank may wait for another."""
    rows = [{"prompt": f"question {i}:", "chosen": f" yes {i}" * 3, "rejected": " no no" * 4} for i in range(24)]
    base, data = tiny_folder("llama"), write_rows("pairs.jsonl", rows)
    more = ["--learning_rate", "1e-3", "--warmup_steps", "40", "--num_train_epochs", "8", "--save_steps", "2"]
    launcher = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
    launcher += ("--main_process_port", "0")
    run = tmp_path / "run"
    argv = arguments(base, data, run, *more, "--preflight", "warn", "--guard", "stop")
    code, output = run_command(*argv, launcher=launcher)
    status, health = (json.loads((run / name).read_text()) for name in ("status.json", "health.json"))
    assert (status["state"], status["exit_code"]) == ("collapsed", 4), output[-3000:]
    assert code  # the launcher's own
    assert health["stopped"] and (Path(health["last_healthy"]) / "KEEP").is_file()
    preflight = json.loads((run / "preflight.json").read_text())
    assert preflight["figures"]["pairs"] == 24
    assert output.count("preflight: no-go") == output.count("guard: stop:") == 1  # said once


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "neither a folder with a model nor one that the Hub gives"),
        (["config.json"], "lacks weights (*.safetensors)"),
        (["config.json", "model.safetensors"], "no tokenizer"),
        (["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"], "no chat template"),
    ],
)
def test_incomplete_model_is_one_line_and_the_folder_can_be_used(
    tiny_folder, write_rows, tmp_path, capsys, files, message
):
    base, data, run = tiny_folder("llama"), write_rows("pairs.jsonl", prompt_rows()), tmp_path / "run"
    (tmp_path / "bare").mkdir()
    for name in files:
        shutil.copy(base / name, tmp_path / "bare")
    assert train_dpo.main(arguments(tmp_path / "bare", data, run)) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0] and "bare" in errors[0], captured.err
    assert "Traceback" not in captured.err and "Loading weights" not in captured.err + captured.out
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2) and message in status["message"]
    if not files:
        assert train_dpo.main(arguments(base, data, run, "--max_steps", "1")) == 0
