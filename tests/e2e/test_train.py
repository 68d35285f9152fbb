"""train_dpo.py as a user starts it: what a run leaves behind, and what a second start does."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from tests.e2e.runs import FIELDS
from tests.toolbox import error_line, logged, on_cpu

FILES = """README.md config.json data.json environment.json model.safetensors resolved_config.yaml status.json
    tokenizer.json tokenizer_config.json trainer_state.json""".split()
SMALL = {"max_length": 256, "learning_rate": 1e-4, "preflight": "warn", "guard": "warn"}


def prompt_rows() -> list[dict]:
    """The shape of Dolci-Think: `prompt` text, responses as message lists, a column that is not ours."""
    rows = []
    for i in range(24):
        sides = {"chosen": "two " * (1 + i * 5 % 11), "rejected": "I cannot say " * (1 + i % 5)}
        messages = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
        rows.append({"id": i, "prompt": f"Wie viele Äpfel? {i} " + "bitte " * (i % 8)} | messages)
    return rows


def test_as_a_command_with_a_recipe_spaces_and_secrets(place, tiny_folder, write_rows, tmp_path, capsys, environment):
    """The command itself: precedence, a folder with a space, no secret in anything it leaves or says, done."""
    base = tiny_folder("gpt_neox")
    data = write_rows("two words ü/pairs.jsonl", prompt_rows())
    run = tmp_path / "my run"
    recipe = SMALL | {"model_name_or_path": str(base), "dataset_name": str(data), "output_dir": str(run)}
    recipe |= {"use_cpu": True, "global_batch_size": 8, "logging_steps": 1, "log_level": "info"}
    (tmp_path / "my recipe.yaml").write_text(yaml.safe_dump(recipe))
    unset = dict.fromkeys([*FIELDS, "model_name_or_path", "dataset_name"])
    given = unset | {"config": tmp_path / "my recipe.yaml", "per_device_train_batch_size": 4, "output_dir": run}
    started = place.start("command", env={"HF_TOKEN": "hf_canary_env", "WANDB_API_KEY": "wandb_canary"}, **given)
    assert started.wait() == 0, started.log
    assert "tokenizing 24 pairs\n" in started.log and "\r" not in started.log_file.read_bytes().decode()  # no bars
    log = started.log.replace(str(tmp_path), "")
    assert max(map(len, log.splitlines())) <= 200 and log.count("\n") < 60, log
    assert {path.name for path in run.iterdir()} >= set(FILES)
    assert list(run.glob("checkpoint-*/trainer_state.json"))
    resolved = yaml.safe_load((run / "resolved_config.yaml").read_text())
    assert resolved["per_device_train_batch_size"] == 4
    contents = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert "canary" not in started.log and not [path for path, data in contents.items() if b"canary" in data]

    status = json.loads(contents[run / "status.json"])
    losses = [entry["loss"] for entry in logged(run)]
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, len(losses)) and len(losses) == 3
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4) and all(map(math.isfinite, losses))
    before = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    after, info = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
    assert AutoTokenizer.from_pretrained(run).chat_template == AutoTokenizer.from_pretrained(base).chat_template

    words = ["--config", str(tmp_path / "my recipe.yaml"), "--per_device_train_batch_size", "4"]
    assert train_dpo.main(words) == 0
    assert "already done" in capsys.readouterr().out
    assert train_dpo.main([*words, "--seed", "7"]) == 2
    assert "seed is 42 there, 7 here" in error_line(capsys.readouterr().err)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == contents


def test_held_out_sets_are_scored_apart(tiny_folder, write_rows, tmp_path, no_report):
    """One of the named sets is the other with its sides swapped."""
    rows = prompt_rows()
    run = tmp_path / "run"
    few = write_rows("few.jsonl", rows[:7])
    swapped = write_rows("swapped.jsonl", [r | {"chosen": r["rejected"], "rejected": r["chosen"]} for r in rows[:7]])
    sets = json.dumps({"few": {"path": str(few), "split": "train"}, "swapped_eval": str(swapped)})
    rows += [rows[0] | {"rejected": rows[0]["chosen"]}, rows[1] | {"prompt": "long " * 100}]
    more = {"eval_fraction": 0.25, "num_train_epochs": 4, "learning_rate": 1e-3, "max_dropped_fraction": 0.2}
    more |= {"precompute_ref_log_probs": "true", "eval_datasets": sets, "eval_strategy": "steps", "eval_steps": 4}
    argv = on_cpu(tiny_folder("gpt_neox"), write_rows("p.jsonl", rows), run, **SMALL | more)
    assert train_dpo.main(argv) == 0
    scores = [(entry["step"], entry["eval_rewards/accuracies"]) for entry in logged(run, "eval_loss")]
    assert scores[0] == (0, 0.5)
    assert scores[-1][0] == 16 and scores[-1][1] > 0.7
    data = json.loads((run / "data.json").read_text())
    assert (data["rows"], data["train"], data["eval"]) == (26, 18, 6)
    assert data["eval_sets"] == {"few": 7, "swapped_eval": 7}
    assert data["reference"].keys() == {"train", "eval", "few", "swapped_eval"}
    assert data["dropped"] == {"chosen_equals_rejected": 1, "prompt_too_long": 1}

    few = logged(run, "eval_few_loss")
    swapped = logged(run, "eval_swapped_eval_loss")
    assert [e["step"] for e in few] == [e["step"] for e in swapped] == [0, 4, 8, 12, 16]
    for one, other in zip(few[1:], swapped[1:], strict=True):
        assert one["eval_few_rewards/margins"] == pytest.approx(-other["eval_swapped_eval_rewards/margins"], rel=1e-4)
        assert one["eval_few_rewards/accuracies"] == pytest.approx(1 - other["eval_swapped_eval_rewards/accuracies"])


def test_two_processes_stop_together_where_the_guard_says_so(place, write_rows):
    """Preflight on two ranks without a cache, then a collapse: no rank may wait for another."""
    rows = [{"prompt": f"question {i}:", "chosen": f" yes {i}" * 3, "rejected": " no no" * 4} for i in range(24)]
    fields = {"dataset_name": write_rows("pairs.jsonl", rows), "warmup_steps": 40, "num_train_epochs": 8}
    fields |= {"global_batch_size": 4, "precompute_ref_log_probs": "false", "guard": "stop"}
    run = place.start("collapse", 2, **fields)
    assert run.wait() != 0, "the launcher's own"
    assert (run.status["state"], run.status["exit_code"]) == ("collapsed", 4), run.log[-3000:]
    health = json.loads((run.folder / "health.json").read_text())
    assert health["stopped"] and (Path(health["last_healthy"]) / "KEEP").is_file()
    assert json.loads((run.folder / "preflight.json").read_text())["pairs"] == 24
    assert run.log.count("preflight: no-go") == run.log.count("guard: stop:") == 1  # said once
