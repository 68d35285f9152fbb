"""Pushes over real HTTP, huggingface_hub's own client against tests/hub_server.py: what arrives, and every failure."""

import json
import os
import platform
import shutil
import time
from pathlib import Path

import generate
import merge
import prefetch
import push_to_hub
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from scripts import check_config
from sfm_dpo.common.errors import UserError
from sfm_dpo.config.fields import TrainConfig, parse_config
from sfm_dpo.hub.upload import check_access, start_push
from sfm_dpo.model.loading import identify_model, load_model, load_model_config
from sfm_dpo.run.checkpoint import COMPLETE, KEEP, PUSHING, STOP, rotate
from sfm_dpo.run.folder import RESOLVED_CONFIG, read_file, read_status, write_end, write_status
from sfm_dpo.run.lock import LOCK, Lease
from sfm_dpo.run.reader import describe_run, format_runs
from sfm_dpo.run.saved_model import find_run
from tests.hub_server import NAME, TOKEN
from tests.tiny_models import tiny_tokenizer
from tests.toolbox import edit, on_cpu, pairs

WEIGHTS = "model.safetensors"


def push(path, *more) -> int:
    return push_to_hub.main([str(path), "--hub_model_id", "lab/model", *more])


def files(hub, revision="main") -> dict[str, bytes]:
    return hub.repos["lab/model"].files(revision)


def answer(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([[72, 105, 33, 256]])).logits


def test_what_was_pushed_loads_from_there_and_a_second_push_changes_nothing(hub, run):
    assert push(run) == 0
    assert hub.count("POST .*/create") == 1, "access is checked once"
    loaded, info = AutoModelForCausalLM.from_pretrained("lab/model", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(answer(loaded), answer(AutoModelForCausalLM.from_pretrained(run)))
    tokenizer = AutoTokenizer.from_pretrained("lab/model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(run).chat_template
    assert hub.repos["lab/model"].private
    expected = """README.md chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json
        tokenizer_config.json figures/accuracy.png figures/loss.png figures/margin.png figures/rewards.png"""
    assert set(files(hub)) == set(expected.split())  # no optimizer, no training_args.bin, no status
    everything = b"".join(data for name, data in files(hub).items() if name != WEIGHTS)
    assert str(run.parent).encode() not in everything and TOKEN.encode() not in everything
    assert not any(b"name_or_path" in files(hub)[name] for name in ("config.json", "tokenizer_config.json"))
    status = read_status(run)
    head = hub.repos["lab/model"].branches["main"]
    assert (status["state"], status["pushed"]) == ("done", f"{hub.url}/lab/model/commit/{head}")

    text = files(hub)["README.md"].decode()
    assert ModelCard(text).data.library_name == "transformers"
    assert "(figures/loss.png)" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["learning_rate"] == 1e-3 and recipe["model_name_or_path"].startswith("path/to/")
    snippet = text.split("```python\n")[1].split("```")[0]  # as a reader would paste it
    exec(snippet.replace("max_new_tokens=256", "max_new_tokens=3"), {})

    sent = hub.received
    assert push(run) == 0
    assert hub.repos["lab/model"].branches == {"main": head} and hub.received == sent
    assert hub.count("POST .*/commit/") == 1

    # Of an earlier push: shards, an adapter's configuration (Transformers would then load its weights), added tokens
    for name in ("model-00001-of-00002.safetensors", "adapter_config.json", "added_tokens.json"):
        files(hub)[name] = b'{"base_model_name_or_path": "lab/base", "peft_type": "LORA"}'
    edit(run / "generation_config.json", max_length=77)
    assert push(run) == 0
    assert set(files(hub)) == set(expected.split())
    assert torch.equal(answer(AutoModelForCausalLM.from_pretrained("lab/model")), answer(loaded))


def test_a_batch_job_does_the_open_steps_of_a_trained_run_and_nothing_else(hub, run, capsys, monkeypatch, environment):
    """As if the job before it had been killed once the model was saved."""
    monkeypatch.setenv("LAUNCH", "cpu")
    (run / "report.html").unlink()
    write_end(run, ["pushed", "reported"], step=6)
    shown = format_runs([describe_run(run, None, time.time())])
    assert f"{run}: to be done by the same command: pushed, reported" in shown and "not pushed yet" in shown
    fields = ["--config", str(run / RESOLVED_CONFIG), "--output_dir", str(run), "--push_to_hub", "true"]
    fields += ["--hub_model_id", "lab/model"]
    hub.fault("POST .*/commit/", "silent", times=99)
    assert check_config.main(["1", *fields, "--hub_timeout", "5"]) == 5
    status = read_status(run)
    assert (status["state"], status["exit_code"], status["open"]) == ("push_failed", 5, ["pushed"])
    assert "push failed: it took too long (hub_timeout); push later with: " in status["message"]
    assert not (run / PUSHING).exists() and "was not pushed to the Hub" in (run / "report.html").read_text()
    hub.faults.clear()
    (run / STOP).touch()
    assert check_config.main(["1", *fields]) == 0
    status = read_status(run)
    assert (status["state"], status["exit_code"], status["message"], status["open"]) == ("done", 0, "", [])
    assert status["step"] == 6 and WEIGHTS in files(hub) and not list(run.glob(".hub-*"))
    assert "was not pushed to the Hub" not in (run / "report.html").read_text()
    assert not (run / LOCK).exists() and not (run / STOP).exists()
    sent = hub.count("POST")
    assert check_config.main(["1", *fields]) == train_dpo.main(fields) == 0 and hub.count("POST") == sent
    assert "output_dir:" not in capsys.readouterr().out, "what would start the nodes"


def test_a_checkpoint_goes_to_a_branch_of_its_own_with_the_results_that_evaluate_has_collected(hub, run, monkeypatch):
    scores = {step: {"acc (5-shot": {"value": 0.5, "stderr": None}} for step in (4, 6)}
    (run / "evaluation.json").write_text(json.dumps({"checkpoints": scores}))
    (start,) = read_file(run / "environment.json")["starts"]
    edit(run / "environment.json", starts=[start, start | {"step": 5}], gpus=["H200"])
    assert push(run, "--hub_revision", "step-{step}") == 0
    (run / "best").symlink_to("checkpoint-4")
    assert push(run / "best", "--hub_revision", "step-{step}") == 0
    monkeypatch.chdir(run / "checkpoint-4")
    assert find_run(Path()) == run
    assert set(hub.repos["lab/model"].branches) == {"main", "step-4"}
    weights = {revision: files(hub, revision)[WEIGHTS] for revision in ("main", "step-4")}
    assert weights["main"] == (run / WEIGHTS).read_bytes()
    assert weights["step-4"] == (run / "checkpoint-4" / WEIGHTS).read_bytes() != weights["main"]
    card = files(hub, "step-4")["README.md"].decode()
    assert 'revision="step-4"' in card and "checkpoint of step 4" in card and "acc (5-shot" in card
    cards = [files(hub, revision)["README.md"].decode() for revision in ("main", "step-4")]
    assert ["pairs, 2 epochs, 6 steps |" in card for card in cards] == [True, False]
    for of_the_run in ("is a restart", "GPU-hours |"):
        assert [of_the_run in card for card in cards] == [True, False]
    assert not (run / "checkpoint-4" / PUSHING).exists()


def test_a_chat_compares_with_the_revision_that_the_run_started_from(hub, run, capsys):
    assert push(run, "--hub_revision", "v1") == 0  # main holds no model
    edit(run / "resolved_config.yaml", model_name_or_path="lab/model", model_revision="v1")
    edit(run / "data.json", models={})
    assert generate.main([str(run), "Hi", "--max_new_tokens", "2"]) == 0
    assert "base: " in capsys.readouterr().out


def test_a_checkpoint_that_is_pushed_is_not_rotated_away(hub, run, capsys):
    mark = run / "checkpoint-4" / PUSHING
    (run / "checkpoint-4" / KEEP).unlink(missing_ok=True)  # the guard's
    pusher = Lease(mark)
    assert pusher.take() and push(run / "checkpoint-4") == 2
    assert f"is being pushed by process {os.getpid()} on " in capsys.readouterr().err
    rotate(run, 1)
    mark.write_text(mark.read_text().replace(f'"host": "{platform.node()}"', '"host": "elsewhere"'))
    rotate(run, 1)
    assert (run / "checkpoint-4").is_dir()
    os.utime(mark, (0, 0))  # nobody renews it
    rotate(run, 1)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-6"]
    pusher.release()


def test_what_its_users_could_not_use_is_not_pushed(hub, run, capsys):
    (run / COMPLETE).unlink()  # as of an earlier version
    state = load_file(run / WEIGHTS)
    state["embed_out.weight"].view(-1)[0] = torch.nan
    lacking = load_file(run / WEIGHTS)
    lacking.pop("gpt_neox.final_layer_norm.weight")
    for weights, message in ((state, "holds NaN or infinite values"), (lacking, "does not load all weights")):
        save_file(weights, run / WEIGHTS, {"format": "pt"})
        assert push(run) == 2
        assert message in capsys.readouterr().err
    (run / "chat_template.jinja").unlink()
    assert push(run) == 2
    assert "no chat template" in capsys.readouterr().err
    assert read_status(run)["state"] == "done" and not files(hub)


def test_an_adapter_is_merged(tiny_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny_folder("llama"), dtype=torch.bfloat16).save_pretrained(base)
    options = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)  # B is not zero
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="float32"), options)
    adapter.save_pretrained("outputs/lora")
    tiny_tokenizer().save_pretrained("outputs/lora")
    loaded = load_model("outputs/lora", {})  # merges the same in memory
    assert torch.allclose(answer(loaded), answer(adapter), atol=1e-4)
    assert loaded.name_or_path == "outputs/lora" and all(p.requires_grad for p in loaded.parameters())
    config = parse_config(on_cpu("outputs/lora", tmp_path / "p.jsonl", tmp_path / "run"))
    assert load_model_config(config).model_type == "llama"
    found = identify_model(config)
    edit(Path("outputs/lora/adapter_config.json"), lora_alpha=16)
    assert identify_model(config) != found, "the adapter's scale"
    edit(Path("outputs/lora/adapter_config.json"), lora_alpha=8, base_model_name_or_path=str(tiny_folder("olmo2")))
    assert identify_model(config) != found, "another base"
    edit(Path("outputs/lora/adapter_config.json"), base_model_name_or_path=str(base))
    assert identify_model(config) == found
    write_status(Path("outputs/lora"), "done", 0)
    (Path("outputs/lora") / RESOLVED_CONFIG).write_text(yaml.safe_dump({"model_name_or_path": str(base)}))
    command = ["outputs/lora", "--output_dir", "outputs/merged"]
    assert merge.main(command) == 0
    merged = AutoModelForCausalLM.from_pretrained("outputs/merged", dtype="float32")
    assert torch.allclose(answer(merged), answer(adapter), atol=0.1)  # bf16
    assert not torch.allclose(answer(merged), answer(load_model(str(base), {})), atol=0.3)
    written = {path.name: path for path in Path("outputs/merged").iterdir()}
    assert {tensor.dtype for tensor in load_file(written[WEIGHTS]).values()} == {torch.bfloat16}
    assert written[WEIGHTS].stat().st_mode == written["config.json"].stat().st_mode
    assert json.loads(written["config.json"].read_text())["rope_theta"] == 10000
    assert "PreTrainedTokenizerFast" in written["tokenizer_config.json"].read_text()
    assert written["chat_template.jinja"].read_text() == tiny_tokenizer().chat_template
    assert merge.main(command) == 2 and "outputs/merged: exists; choose another" in capsys.readouterr().err
    (Path("outputs/lora") / "adapter_config.json").unlink()
    assert merge.main(command) == 2 and "a whole model, so there is nothing to merge" in capsys.readouterr().err


def test_a_pushed_adapter_names_its_base_on_the_hub_and_no_path(hub, run, tmp_path, capsys):
    """Its base is a local folder, a copy in the Hub's cache, or a model on the Hub at the commit in data.json."""
    adapter = get_peft_model(AutoModelForCausalLM.from_pretrained(run), LoraConfig(target_modules=["query_key_value"]))
    copy = tmp_path / "hub-cache/models--lab--base/snapshots/0123abcd"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoint-*"))
    adapter.peft_config["default"].base_model_name_or_path = str(copy)
    for name in (WEIGHTS, "config.json", COMPLETE):
        (run / name).unlink()
    adapter.save_pretrained(run)
    edit(run / RESOLVED_CONFIG, model_name_or_path=str(tmp_path))
    assert push(run) == 2
    assert "is a folder of this machine, which a pushed LoRA adapter must not name" in capsys.readouterr().err
    edit(run / "data.json", models={"model_name_or_path": "4567ef"})
    for base, revision in ((str(copy), "0123abcd"), ("lab/base", "4567ef")):
        edit(run / RESOLVED_CONFIG, model_name_or_path=base)
        assert push(run) == 0
        pushed = json.loads(files(hub)["adapter_config.json"])
        assert (pushed["base_model_name_or_path"], pushed["revision"]) == ("lab/base", revision)
        assert not any(str(tmp_path).encode() in data for data in files(hub).values())
    edit(run / "tokenizer_config.json", vocab_file="/scratch/bob/tokenizer.model")
    assert push(run) == 2
    error = capsys.readouterr().err
    assert "tokenizer_config.json: contains a path of this machine, /scratch/bob/tokenizer.model" in error
    edit(copy / "tokenizer_config.json", vocab_file="/scratch/bob/tokenizer.model")  # published with its base
    edit(run / RESOLVED_CONFIG, model_name_or_path=str(copy))
    assert push(run) == 0
    edit(run / "tokenizer_config.json", zone="/scratch/bob/zone")
    assert push(run) == 2
    assert "a path of this machine, /scratch/bob/zone; remove it" in capsys.readouterr().err


def test_what_is_no_finished_model_is_refused_in_one_line(hub, run, tmp_path, capsys):
    (run / "checkpoint-4" / "complete.json").unlink()
    (run / "complete.json").unlink()
    write_status(run, "stopped", 75, step=4)
    for path, message in {
        tmp_path: "not a run's folder or checkpoint",
        run / "checkpoint-4": "was not fully written; choose another checkpoint",
        run: "not finished (state stopped); choose one of its checkpoints, if any",
    }.items():
        assert push(path) == 2
        assert message in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert not hub.log


@pytest.mark.parametrize(
    ("token", "model_id", "message"),
    [
        ("", "lab/m", "no token; put HF_TOKEN into .env, run `hf auth login`, or do X"),
        ("hf_wrong", "lab/m", "Invalid credentials"),
        (TOKEN, "else/m", "403 Forbidden"),
        (TOKEN, "a b", "HFValidationError"),
        (TOKEN, "lab/down", "ConnectError"),
    ],
)
def test_a_push_that_could_not_begin_is_found_before_training(hub, monkeypatch, token, model_id, message):
    monkeypatch.setenv("HF_TOKEN", token)
    if model_id == "lab/down":
        hub.shutdown()
        hub.server_close()
    with pytest.raises(UserError) as caught:
        check_access(model_id, True, None, "do X")
    assert message in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).endswith("or do X")


def test_access_makes_a_private_repository_and_its_branch(hub):
    hub.fault("GET .*/auth-check", 500)  # an error that passes is waited for
    hub.fault("POST .*/create", 503)
    for _ in range(2):  # it may be there already
        assert check_access("model", True, "dev", "") == f"{NAME}/model"
    assert hub.repos[f"{NAME}/model"].private and "dev" in hub.repos[f"{NAME}/model"].branches
    assert push_to_hub.choose_repo({}, Path("beta=5,learning_rate=1e-06")) == "beta-5-learning_rate-1e-06"
    assert check_access("open", False, None, "") == f"{NAME}/open"
    assert not hub.repos[f"{NAME}/open"].private
    with pytest.raises(UserError, match="is public; if this is intended, set hub_private_repo: false"):
        check_access("open", True, None, "")


@pytest.mark.slow
def test_a_start_that_only_pushes_does_so_by_its_own_configuration(hub, run, monkeypatch):
    edit(run / RESOLVED_CONFIG, hub_private_repo=False)
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    process, _ = start_push(run, TrainConfig(output_dir=str(run), hub_model_id="lab/model", use_cpu=True))
    assert process.wait() == 0 and hub.repos["lab/model"].private


@pytest.mark.slow
def test_a_push_that_the_hub_refuses_says_why_and_how_to_push_later(hub, run, capsys):
    for status, attempts in ((403, 1), (500, 1 + 4)):
        hub.faults.clear()
        hub.fault("POST .*/commit/", status, times=99)
        assert push(run) == 5
        assert hub.count("POST .*/commit/") == attempts, "only what may pass is tried again"
    command = f"python scripts/push_to_hub.py {run} --hub_model_id lab/model"
    error = capsys.readouterr().err.strip()
    assert "push failed: " in error and "403" in error and "500" in error
    assert error.endswith(f"push later with: {command}")
    assert read_status(run)["state"] == "done", "the run is what it was"
    assert not files(hub), "a repository is never half-written"

    hub.faults.clear()
    sent = hub.received
    assert push_to_hub.main(command.split()[2:]) == 0  # the command that was printed
    assert hub.received == sent, "what had arrived was sent again"
    assert "pushed" in read_status(run) and WEIGHTS in files(hub)


@pytest.mark.parametrize("options", [["--download_only"], ["--download_only", "--trust_remote_code", "true"]])
def test_prefetch_downloads_code_that_a_recipe_trusts(hub, run, write_rows, capsys, tmp_path, options):
    """And computes nothing."""
    assert push(run) == 0
    files(hub).update({"modeling_own.py": b"pass", "vocab.tiktoken": b""})
    rows = write_rows("p.jsonl", pairs(4))
    words = ["--model_name_or_path", "lab/model", "--dataset_name", str(rows), "--use_cpu", *options]
    assert prefetch.main(words) == 0
    printed = capsys.readouterr().out
    assert f"data {rows}: 4 rows" in printed and "tokenizing" not in printed
    found = {path.name for path in (tmp_path / "hub-cache").rglob("snapshots/*/*")}
    assert {WEIGHTS, "vocab.tiktoken"} <= found and ("modeling_own.py" in found) is (len(options) > 1)


def test_failures_that_pass_are_waited_for(hub, run):
    hub.fault("POST .*/commit/", 409)
    hub.fault("PUT /lfs/", "cut")
    assert push(run) == 0
    assert files(hub)[WEIGHTS] == (run / WEIGHTS).read_bytes() and read_status(run)["state"] == "done"


def test_what_is_finished_or_pushed_has_the_base_s_dtype_and_a_checkpoint_its_own(
    hub, tiny_folder, write_rows, tmp_path, no_report
):
    """The base model is in 16 bit but for one weight, and its config.json was written by hand."""
    base = tmp_path / "base"
    run = tmp_path / "run"
    shutil.copytree(tiny_folder("olmo3"), base)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(base / WEIGHTS).items()}
    weights["model.norm.weight"] = weights["model.norm.weight"].float()
    save_file(weights, base / WEIGHTS, {"format": "pt"})
    edit(base / "config.json", use_cache=False, unknown_field=7, dtype="bfloat16")
    fields = {"max_steps": 1, "per_device_train_batch_size": 4, "warmup_steps": 0}
    assert train_dpo.main(on_cpu(base, write_rows("pairs.jsonl", pairs(4)), run, **fields)) == 0
    config = json.loads((run / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert (config["use_cache"], config["unknown_field"]) == (True, 7)
    saved = load_file(run / WEIGHTS)
    assert {name: tensor.dtype for name, tensor in saved.items()} == {name: w.dtype for name, w in weights.items()}
    assert len([path for path in run.glob("*.json") if "config" in path.name]) == 3
    assert not any(str(tmp_path) in path.read_text() for path in run.glob("*config.json"))
    checkpoint = run / "checkpoint-1"
    trained = load_file(checkpoint / WEIGHTS)
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert json.loads((checkpoint / "config.json").read_text())["torch_dtype"] == "float32"
    assert all(torch.equal(tensor, trained[name].to(tensor.dtype)) for name, tensor in saved.items())
    assert push(checkpoint) == 0
    assert files(hub)[WEIGHTS] == (run / WEIGHTS).read_bytes()
    assert json.loads(files(hub)["config.json"])["torch_dtype"] == "bfloat16"
    edit(run / RESOLVED_CONFIG, save_dtype="trained")
    assert push(checkpoint) == 0
    assert files(hub)[WEIGHTS] == (checkpoint / WEIGHTS).read_bytes()


def test_a_run_of_an_earlier_version_is_pushed_in_a_form_that_all_readers_know(hub, run, tmp_path, capsys):
    """As Transformers 5 saves; its base is gone, and its chat template was edited since."""
    config = json.loads((run / "config.json").read_text())
    for name in ("rotary_emb_base", "rotary_pct", "rope_scaling", "torch_dtype"):
        del config[name]
    (run / "config.json").write_text(json.dumps(config))
    edit(run / "tokenizer_config.json", extra_special_tokens=["<|im_start|>"])
    (run / "chat_template.jinja").write_text("edited")
    (run / "additional_chat_templates").mkdir()
    (run / "additional_chat_templates/tools.jinja").write_text("tools")
    edit(run / RESOLVED_CONFIG, model_name_or_path=str(tmp_path / "gone"))
    assert push(run) == 0
    assert f"{tmp_path / 'gone'}: neither a folder nor a model on the Hub any more" in capsys.readouterr().err
    pushed = json.loads(files(hub)["config.json"])
    assert (pushed["rotary_emb_base"], pushed["rotary_pct"], pushed["torch_dtype"]) == (10000, 0.25, "float32")
    tokenizer = json.loads(files(hub)["tokenizer_config.json"])
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer["additional_special_tokens"] == ["<|im_start|>"] and "extra_special_tokens" not in tokenizer
    assert files(hub)["chat_template.jinja"] == b"edited"
    assert files(hub)["additional_chat_templates/tools.jinja"] == b"tools"
    assert json.loads((run / "config.json").read_text()) == config, "what is pushed is a copy"
