"""train_dpo.py as a user starts it: what a run leaves behind, what a mistake says, what a second start does.

Runs in this process through `train_dpo.main` where nothing is lost by it, and as real commands where something is.
"""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
FILES = """README.md config.json data.json environment.json model.safetensors resolved_config.yaml status.json
    tokenizer.json tokenizer_config.json trainer_state.json""".split()


def prompt_rows(n: int = 24) -> list[dict]:
    """The shape of Dolci-Think: `prompt` text, responses as message lists, a column that is not ours."""
    draw = random.Random(0)
    return [
        {
            "id": i,
            "prompt": f"Wie viele Äpfel? {i} " + "bitte " * draw.randrange(8),
            "chosen": [{"role": "assistant", "content": "two " * draw.randrange(1, 12)}],
            "rejected": [{"role": "assistant", "content": "I cannot say " * draw.randrange(1, 6)}],
        }
        for i in range(n)
    ]


def chat_rows(n: int = 24) -> list[dict]:
    """The shape of Dolci-Instruct: whole conversations, some of several turns, keys that are None."""
    rows = []
    for i, row in enumerate(prompt_rows(n)):
        lead = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * (i % 2)
        lead.append({"role": "user", "content": row["prompt"]})
        sides = {side: [{**m, "functions": None} for m in lead + row[side]] for side in ("chosen", "rejected")}
        rows.append(sides | {"prompt_id": f"i{i}"})
    return rows


def arguments(model, data, out, *more: str) -> list[str]:
    """A CPU run of a few steps of 4 pairs."""
    return [
        *("--model_name_or_path", str(model), "--dataset_name", str(data), "--output_dir", str(out), "--use_cpu"),
        *("--global_batch_size", "4", "--per_device_train_batch_size", "2", "--max_length", "256"),
        *("--learning_rate", "1e-4", "--logging_steps", "1"),
        *("--preflight", "warn", "--guard", "warn", *more),  # random weights find every answer impossible
    ]


def command(*args: str, launcher: tuple[str, ...] = (), **env: str) -> subprocess.Popen:
    program = [sys.executable, *launcher, str(ROOT / "train_dpo.py"), *args]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
    return subprocess.Popen(
        program, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen) -> str:
    try:
        return process.communicate(timeout=240)[0]
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


# ---- it trains


@pytest.mark.parametrize("shape", [prompt_rows, chat_rows])
@pytest.mark.parametrize("architecture", ["gpt_neox", "olmo3", "llama"])
def test_trains_to_a_documented_model(tiny_folder, write_rows, tmp_path, architecture, shape):
    base, run = tiny_folder(architecture), tmp_path / "run"
    assert train_dpo.main(arguments(base, write_rows("pairs.jsonl", shape()), run)) == 0
    assert_trained(run, base)
    assert len(losses(run)) == 6


@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data")
@pytest.mark.parametrize("name", ["pairs_prompt.jsonl", "pairs_chat.jsonl"])
@pytest.mark.parametrize("architecture", ["gpt_neox", "olmo3", "llama"])
def test_trains_on_real_pairs(tiny_folder, tmp_path, architecture, name):
    base, run = tiny_folder(architecture), tmp_path / "run"
    more = ["--max_samples", "16", "--max_prompt_length", "100", "--padding_free"]
    assert train_dpo.main(arguments(base, SHARED / name, run, *more)) == 0
    assert_trained(run, base)


def test_held_out_pairs_are_scored_before_and_after(tiny_folder, write_rows, tmp_path, capsys):
    run = tmp_path / "run"
    more = ["--eval_fraction", "0.25", "--num_train_epochs", "4", "--learning_rate", "1e-3"]
    assert train_dpo.main(arguments(tiny_folder("llama"), write_rows("p.jsonl", prompt_rows()), run, *more)) == 0
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    scores = [(entry["step"], entry["eval_rewards/accuracies"]) for entry in history if "eval_loss" in entry]
    assert scores[0] == (0, 0.5)
    assert scores[-1][0] == 20 and scores[-1][1] > 0.7
    data = json.loads((run / "data.json").read_text())
    assert (data["rows"], data["train"], data["eval"]) == (24, 18, 6)
    assert "held out at step 0" in capsys.readouterr().out


def test_dropped_rows_are_shown_and_written_down(tiny_folder, write_rows, tmp_path, capsys):
    rows = prompt_rows()
    rows[3]["rejected"] = rows[3]["chosen"]
    rows[5]["chosen"][0]["content"] = " "
    rows[7]["prompt"] = "long " * 100
    run = tmp_path / "run"
    more = ["--max_dropped_fraction", "0.2", "--max_steps", "1"]
    assert train_dpo.main(arguments(tiny_folder("llama"), write_rows("p.jsonl", rows), run, *more)) == 0
    data = json.loads((run / "data.json").read_text())
    assert data["dropped"] == {"chosen_equals_rejected": 1, "empty_response": 1, "prompt_too_long": 1}
    assert data["rows"] == data["train"] + sum(data["dropped"].values())
    out = capsys.readouterr().out
    assert "dropped: empty response" in out and "dropped: prompt leaves no room" in out


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
    process = command(*args, **secrets)
    output = finish(process)
    assert process.returncode == 0, output
    assert_trained(run, tiny_folder("gpt_neox"))
    resolved = yaml.safe_load((run / "resolved_config.yaml").read_text())
    assert (resolved["per_device_train_batch_size"], resolved["gradient_accumulation_steps"]) == (4, 2)
    assert "canary" not in output
    for path in run.rglob("*"):
        assert path.is_dir() or b"canary" not in path.read_bytes(), path

    weights = (run / "model.safetensors").stat().st_mtime_ns
    process = command(*args, **secrets)
    output = finish(process)
    assert process.returncode == 0 and "already done" in output and "Loading weights" not in output
    assert (run / "model.safetensors").stat().st_mtime_ns == weights


def test_two_processes_stop_together_where_the_guard_says_so(tiny_folder, write_rows, tmp_path):
    """Preflight on two ranks without a cache, then a collapse: no rank may wait for another."""
    rows = [{"prompt": f"question {i}:", "chosen": f" yes {i}" * 3, "rejected": " no no" * 4} for i in range(24)]
    base, data = tiny_folder("llama"), write_rows("pairs.jsonl", rows)
    more = ["--learning_rate", "1e-3", "--warmup_steps", "40", "--num_train_epochs", "8", "--save_steps", "2"]
    launcher = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu.yaml")
    launcher += ("--main_process_port", "0")
    run = tmp_path / "run"
    process = command(*arguments(base, data, run, *more, "--preflight", "warn", "--guard", "stop"), launcher=launcher)
    output = finish(process)
    status, health = (json.loads((run / name).read_text()) for name in ("status.json", "health.json"))
    assert (status["state"], status["exit_code"]) == ("collapsed", 4), output[-3000:]
    assert process.returncode  # the launcher's own
    assert health["stopped"] and (Path(health["last_healthy"]) / "KEEP").is_file()
    preflight = json.loads((run / "preflight.json").read_text())
    assert preflight["figures"]["pairs"] == 24
    assert output.count("preflight: no-go") == output.count("guard: stop:") == 1  # said once


# ---- a second start


def test_another_runs_folder_is_refused_and_kept(tiny_folder, write_rows, tmp_path, capsys):
    base, data, run = tiny_folder("gpt_neox"), write_rows("pairs.jsonl", prompt_rows()), tmp_path / "run"
    assert train_dpo.main(arguments(base, data, run, "--max_steps", "1")) == 0
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert train_dpo.main(arguments(base, data, run, "--max_steps", "1", "--seed", "7")) == 2
    assert "seed is 42 there, 7 here" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


# ---- mistakes


def refused(capsys, argv: list[str], *parts: str) -> str:
    """Exit code 2 with one line on stderr that holds `parts`; no model was loaded."""
    capsys.readouterr()
    start = time.monotonic()
    assert train_dpo.main(argv) == 2
    seconds = time.monotonic() - start
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    message = lines[0]
    assert all(part in message for part in parts), message
    assert len(message) < 500
    assert "Traceback" not in captured.err + captured.out
    assert "Loading weights" not in captured.err + captured.out
    assert seconds < 10
    return message


@pytest.fixture
def wrong(tiny_folder, write_rows, tmp_path, capsys):
    """A function: arguments that spoil a good run, and what the message must say."""
    model, data, run = tiny_folder("llama"), write_rows("good.jsonl", prompt_rows()), tmp_path / "run"

    def check(more: list[str], *parts: str, model=model, data=data, out=run) -> str:
        message = refused(capsys, arguments(model, data, out, *more), *parts)
        assert not list(tmp_path.glob("run/*.safetensors"))
        return message

    return check


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--learning_rat", "1"], ["--learning_rat", "did you mean --learning_rate"]),
        (["--max_length", "0"], ["max_length 0"]),
        (["--beta", "5", "--loss_type", "sigmoid"], ["beta 5", "sums", "allow_unnormalized_beta"]),
        (["--global_batch_size", "7"], ["global_batch_size 7", "these work"]),
        (["--eval_fraction", "0.001"], ["eval_fraction 0.001", "24 pairs"]),
        (["--bf16", "true"], ["bf16", "no GPU"]),
        (["--max_length", "20"], ["max_length 20: no train pair of", "24 x prompt leaves no room"]),
    ],
)
def test_wrong_values(wrong, more, parts):
    wrong(more, *parts)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("missing.jsonl", None, ["no such file"]),
        ("empty.jsonl", "", ["empty"]),
        ("broken.jsonl", '{"prompt": "q", "chosen": "a", "rejected": "b"}\n{"prompt": \n', ["line 2"]),
        ("columns.jsonl", '{"question": "q", "answer": "a"}\n', ["no column", "question, answer"]),
        (
            "same.jsonl",
            '{"prompt": "q", "chosen": "a", "rejected": "a"}\n' * 3,
            ["none of its 3 rows", "chosen equals"],
        ),
    ],
)
def test_wrong_data(wrong, tmp_path, name, content, parts):
    if content is not None:
        (tmp_path / name).write_text(content)
    wrong([], name, *parts, data=tmp_path / name)


def test_wrong_model(wrong, tmp_path, tiny_folder):
    wrong([], "model_name_or_path", "nowhere/at/all", model="/nowhere/at/all")
    wrong([], "model_name_or_path", "org/unknown", model="org/unknown")
    (tmp_path / "empty").mkdir()
    wrong([], "model_name_or_path", "empty", model=tmp_path / "empty")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_folder("llama") / "config.json").read_text())
    wrong([], "lacks weights (*.safetensors)", model=bare)
    (bare / "model.safetensors").write_bytes((tiny_folder("llama") / "model.safetensors").read_bytes())
    wrong([], "no tokenizer", model=bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).write_text((tiny_folder("llama") / name).read_text())
    wrong([], "no chat template", model=bare)


def test_wrong_output_dir(wrong, tmp_path):
    (tmp_path / "file").write_text("x")
    wrong([], "output_dir", "is a file", out=tmp_path / "file")
    wrong([], "output_dir", "cannot be written", out=tmp_path / "file" / "run")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    wrong([], "output_dir", "thesis.tex", out=tmp_path / "thesis")
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["thesis.tex"]


def test_after_a_mistake_the_same_folder_can_be_used(wrong, tiny_folder, write_rows, tmp_path):
    wrong([], "no such file", data=tmp_path / "typo.jsonl")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2) and "no such file" in status["message"]
    data = write_rows("pairs.jsonl", prompt_rows())
    assert train_dpo.main(arguments(tiny_folder("llama"), data, tmp_path / "run", "--max_steps", "1")) == 0


def test_help_explains_and_succeeds(capsys):
    with pytest.raises(SystemExit) as ended:
        train_dpo.main(["--help"])
    assert not ended.value.code
    output = capsys.readouterr().out
    assert "--global_batch_size" in output and "--config" in output
