"""Pushes over real HTTP, huggingface_hub's own client against tests/hub_server.py: what arrives, what faults say."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint
import yaml
from huggingface_hub import ModelCard, constants
from huggingface_hub.utils import _http
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_dpo
from sfm_dpo.hub import upload as client
from sfm_dpo.hub.publish import consolidate
from sfm_dpo.run.checkpoint import KEEP, PUSHING, rotate
from sfm_dpo.run.folder import read_status, write_status
from tests.hub_server import NAME, READ_TOKEN, TOKEN

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import push_to_hub

ROWS = [
    {"prompt": f"Count to {i}.", "chosen": "one two " * (1 + i % 3), "rejected": "I would rather not. " * (1 + i % 2)}
    for i in range(12)
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_folder):
    """A real run of 4 steps with checkpoints at 2 and 4, and held-out pairs."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    args = {"model_name_or_path": tiny_folder("gpt_neox"), "dataset_name": folder / "pairs.jsonl"}
    args |= {"output_dir": folder / "run", "global_batch_size": 2, "per_device_train_batch_size": 2, "max_steps": 4}
    args |= {"max_length": 128, "learning_rate": 1e-3, "save_steps": 2, "eval_fraction": 0.25, "logging_steps": 1}
    args |= {"preflight": "warn", "guard": "warn"}  # random weights find every answer impossible
    assert train_dpo.main(["--use_cpu", *(str(part) for k, v in args.items() for part in (f"--{k}", v))]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of it, so that a test may spoil it."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def push(path, *more) -> int:
    return push_to_hub.main([str(path), "--hub_model_id", "lab/model", *more])


def files(hub, revision="main") -> dict[str, bytes]:
    return hub.repos["lab/model"].files(revision)


def answer(model) -> torch.Tensor:
    return model(input_ids=torch.tensor([[72, 105, 33, 256]])).logits


# ---- what arrives


def test_what_was_pushed_loads_from_there_and_answers_the_same(hub, run, monkeypatch):
    assert push(run) == 0
    loaded, info = AutoModelForCausalLM.from_pretrained("lab/model", output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(answer(loaded), answer(AutoModelForCausalLM.from_pretrained(run)))
    tokenizer = AutoTokenizer.from_pretrained("lab/model")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(run).chat_template
    assert hub.repos["lab/model"].private
    expected = """README.md chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json
        tokenizer_config.json figures/accuracy.png figures/logps.png figures/loss.png figures/margin.png"""
    assert set(files(hub)) == set(expected.split())  # no optimizer, no training_args.bin, no status
    everything = b"".join(data for name, data in files(hub).items() if name != "model.safetensors")
    assert str(run.parent).encode() not in everything and TOKEN.encode() not in everything
    status = read_status(run)
    head = hub.repos["lab/model"].branches["main"]
    assert (status["state"], status["pushed"]) == ("done", f"{hub.url}/lab/model/commit/{head}")

    # the snippet of the card, as a reader would paste it
    snippet = files(hub)["README.md"].decode().split("```python\n")[1].split("```")[0]
    exec(snippet.replace("max_new_tokens=256", "max_new_tokens=3"), {})


def test_pushing_twice_changes_nothing(hub, run, capsys):
    assert push(run) == 0
    before, sent = dict(hub.repos["lab/model"].branches), hub.received
    assert push(run) == 0
    assert hub.repos["lab/model"].branches == before and hub.received == sent
    assert hub.count("POST .*/commit/") == 1
    assert "nothing new: run is " in capsys.readouterr().out


def test_a_checkpoint_goes_to_a_branch_of_its_own(hub, run):
    assert push(run, "--hub_revision", "step-{step}") == 0
    assert push(run / "checkpoint-2", "--hub_revision", "step-{step}") == 0
    assert set(hub.repos["lab/model"].branches) == {"main", "step-2"}
    weights = {revision: files(hub, revision)["model.safetensors"] for revision in ("main", "step-2")}
    assert weights["main"] == (run / "model.safetensors").read_bytes()
    assert weights["step-2"] == (run / "checkpoint-2" / "model.safetensors").read_bytes() != weights["main"]
    card = files(hub, "step-2")["README.md"].decode()
    assert 'revision="step-2"' in card and "checkpoint of step 2" in card
    assert not any(
        "optimizer" in name or "rng" in name or name.startswith("global_step") for name in files(hub, "step-2")
    )
    assert read_status(run)["state"] == "done"


def test_a_checkpoint_on_its_way_is_not_rotated_away(run):
    pusher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (run / "checkpoint-2" / KEEP).unlink(missing_ok=True)  # the guard's
    (run / "checkpoint-2" / PUSHING).write_text(str(pusher.pid))
    rotate(run, 1)
    assert (run / "checkpoint-2").is_dir()
    pusher.communicate(b"\n")
    rotate(run, 1)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]


def test_shards_of_an_earlier_push_do_not_stay(hub, run):
    assert push(run) == 0
    files(hub)["model-00001-of-00002.safetensors"] = b"old"
    (run / "README.md").touch()
    config = json.loads((run / "generation_config.json").read_text())
    (run / "generation_config.json").write_text(json.dumps(config | {"max_length": 77}))
    assert push(run) == 0
    assert "model-00001-of-00002.safetensors" not in files(hub) and "model.safetensors" in files(hub)


def test_large_files_in_parts(hub, run):
    hub.part_size = 100_000
    assert push(run) == 0
    assert hub.count(r"PUT /lfs/\w+/2") >= 1
    assert files(hub)["model.safetensors"] == (run / "model.safetensors").read_bytes()


def test_the_card_is_valid_for_the_hubs_checker(hub, run):
    assert push(run) == 0
    assert hub.count("POST /api/validate-yaml") >= 1
    text = files(hub)["README.md"].decode()
    card = ModelCard(text)
    card.validate()  # asks the server
    (result,) = card.data.eval_results
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    last = [entry["eval_rewards/accuracies"] for entry in history if "eval_loss" in entry][-1]
    assert (result.metric_type, result.metric_value) == ("accuracy", round(last, 4))
    config, data = (
        yaml.safe_load((run / "resolved_config.yaml").read_text()),
        json.loads((run / "data.json").read_text()),
    )
    assert data["train_fingerprint"] in text and f"{config['learning_rate']:g}" in text
    assert "| 0.50, all ties |" in text and "-log σ(β [" in text and "(figures/loss.png)" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["learning_rate"] == 1e-3 and recipe["model_name_or_path"] == "path/to/gpt_neox"
    broken = ModelCard(text.replace("library_name: transformers", "library_name: [1]"))
    with pytest.raises(ValueError, match="library_name"):
        broken.validate()


def test_a_licence_is_named_where_it_is_known(hub, run, tmp_path):
    base = shutil.copytree(
        yaml.safe_load((run / "resolved_config.yaml").read_text())["model_name_or_path"], tmp_path / "b"
    )
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    _change(run / "resolved_config.yaml", "model_name_or_path", str(base))
    assert push(run) == 0
    text = files(hub)["README.md"].decode()
    assert (
        ModelCard(text).data.license == "apache-2.0" and "licence apache-2.0" in text and "licence not known" in text
    )


# ---- what is not published


def test_the_base_model_is_not_published_as_a_new_one(hub, run, capsys):
    shutil.copy(
        Path(yaml.safe_load((run / "resolved_config.yaml").read_text())["model_name_or_path"]) / "model.safetensors",
        run,
    )
    assert push(run) == 5
    assert "the weights are those of the base model, bit by bit" in capsys.readouterr().out
    assert read_status(run)["state"] == "push_failed"
    assert not files(hub) and hub.received == 0
    assert push(run, "--publish_anyway") == 0
    assert "warning: " in capsys.readouterr().out and "model.safetensors" in files(hub)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda run: (run / "chat_template.jinja").unlink(), "no chat template"),
        (lambda run: (run / "generation_config.json").unlink(), "generation_config.json is missing"),
        (lambda run: (run / "tokenizer.json").unlink(), "the tokenizer does not load"),
        (lambda run: _drop(run, "final_layer_norm.weight"), "missing gpt_neox.final_layer_norm.weight"),
        (lambda run: _poison(run), "values that are no finite numbers"),
        (
            lambda run: _change(run / "config.json", "teacher", "/etc/passwd"),
            "teacher is /etc/passwd, a path of this machine",
        ),
    ],
)
def test_what_its_users_could_not_use_is_not_pushed(hub, run, capsys, spoil, says):
    spoil(run)
    assert push(run) == 5
    assert says in capsys.readouterr().out
    assert not files(hub)


def _drop(run: Path, ending: str) -> None:
    state = load_file(run / "model.safetensors")
    save_file({k: v for k, v in state.items() if not k.endswith(ending)}, run / "model.safetensors", {"format": "pt"})


def _poison(run: Path) -> None:
    state = load_file(run / "model.safetensors")
    next(iter(state.values())).view(-1)[0] = torch.nan
    save_file(state, run / "model.safetensors", {"format": "pt"})


def _change(path: Path, key: str, value) -> None:
    read, write = (json.loads, json.dumps) if path.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    path.write_text(write(read(path.read_text()) | {key: value}))


def test_traces_of_how_it_was_loaded_are_taken_out(hub, run):
    _change(run / "config.json", "_name_or_path", str(run))
    _change(run / "tokenizer_config.json", "name_or_path", "elsewhere")
    assert push(run) == 0
    assert "_name_or_path" not in json.loads(files(hub)["config.json"])
    assert "name_or_path" not in json.loads(files(hub)["tokenizer_config.json"])


def test_a_run_that_the_guard_stopped_is_pushed_only_when_asked(hub, run, capsys):
    write_status(run, "collapsed", 4, "margin", step=4, checkpoint=str(run / "checkpoint-2"))
    for path in (run, run / "checkpoint-4"):
        assert push(path) == 2
        error = capsys.readouterr().err
        assert "the guard stopped this run" in error and "checkpoint-2" in error and "--publish_anyway" in error
    assert not hub.repos
    assert push(run / "checkpoint-2") == 0  # the one that the guard calls healthy
    assert push(run, "--publish_anyway") == 0
    assert read_status(run)["state"] == "collapsed"


def test_what_is_no_finished_model_is_refused_in_one_line(hub, run, tmp_path, capsys):
    def says(path) -> str:
        assert push(path) == 2
        return capsys.readouterr().err

    assert "no such folder" in says(tmp_path / "nothing")
    assert "neither a run's folder nor a checkpoint" in says(tmp_path)
    (run / "checkpoint-2" / "complete.json").unlink()
    assert "was not written to the end; push another checkpoint" in says(run / "checkpoint-2")
    write_status(run, "stopped", 75, step=2)
    assert "not finished (state stopped); push one of its checkpoints" in says(run)
    assert not hub.log


# ---- before training


@pytest.mark.parametrize(
    ("prepare", "asked", "says"),
    [
        (lambda hub, env: env("HF_TOKEN", ""), "lab/m", "there is no token; put HF_TOKEN into .env, or do X"),
        (lambda hub, env: env("HF_TOKEN", "hf_wrong"), "lab/m", "does not accept the token: put a valid one"),
        (lambda hub, env: env("HF_TOKEN", READ_TOKEN), "lab/m", "the token may only read"),
        (lambda hub, env: None, "a b", "hub_model_id a b: "),
        (lambda hub, env: None, "strangers/m", "may not write to strangers/m"),
        (lambda hub, env: None, "strangers/m", "(HTTP 403) (this token's own: ann, lab)"),
        (lambda hub, env: hub.fault("GET .*/auth-check", 403), "lab/m", "may not write to lab/m"),
        (lambda hub, env: hub.fault("GET .*/auth-check", 404), "lab/m", "knows no lab/m"),
        (lambda hub, env: hub.fault("POST .*/create", 500, times=9), "lab/m", "a failure of its own (HTTP 500); try"),
        (lambda hub, env: hub.fault("GET .*/whoami", 429, times=9), "lab/m", "limits how often it may be asked"),
        (lambda hub, env: hub.fault("GET .*/whoami", "slow", times=9, seconds=2), "lab/m", "silent for too long"),
        (lambda hub, env: hub.shutdown() or hub.server_close(), "lab/m", "cannot be reached"),
    ],
)
def test_a_push_that_could_not_begin_is_found_before_training(hub, monkeypatch, prepare, asked, says):
    monkeypatch.setattr(client, "ACCESS_SECONDS", 0.2)
    prepare(hub, monkeypatch.setenv)
    with pytest.raises(client.UserError) as caught:
        client.check_access(asked, True, None, "do X")
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_access_makes_a_private_repository_and_its_branch(hub):
    assert client.check_access("model", True, "dev", "") == f"{NAME}/model"
    assert client.check_access("model", True, "dev", "") == f"{NAME}/model"  # it may be there already
    assert hub.repos[f"{NAME}/model"].private and "dev" in hub.repos[f"{NAME}/model"].branches
    assert client.check_access("open", False, None, "") == f"{NAME}/open"
    assert not hub.repos[f"{NAME}/open"].private
    with pytest.raises(
        client.UserError, match="is public; if the model may be seen by all say hub_private_repo: false"
    ):
        client.check_access("open", True, None, "")
    with pytest.raises(client.UserError, match="is no name of a branch"):
        client.check_access("model", True, "a b", "")


def test_a_stumble_is_forgiven(hub):
    hub.fault("GET .*/whoami", 500)
    hub.fault("POST .*/create", 503)
    assert client.check_access("lab/m", True, None, "") == "lab/m"


def test_offline_is_named(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(client.UserError, match="HF_HUB_OFFLINE is set; unset it, or push later"):
        client.check_access("lab/m", True, None, "push later")


# ---- faults while pushing


def pushed_after(hub, run, capsys) -> str:
    assert push(run) == 0
    assert files(hub)["model.safetensors"] == (run / "model.safetensors").read_bytes()
    assert read_status(run)["state"] == "done"
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (401, "the Hub does not accept the token: put a valid one into .env as HF_TOKEN"),
        (403, "the token may not write to lab/model: give it write access there, or choose another hub_model_id"),
        (404, "the Hub knows no lab/model to which this token leads"),
        (409, "somebody else is changing lab/model at this moment"),
        (429, "the Hub limits how often it may be asked"),
        (500, "the Hub has a failure of its own"),
    ],
)
def test_a_push_that_the_hub_refuses_says_why_and_how_to_push_later(hub, run, capsys, status, says):
    hub.fault("POST .*/commit/", status, times=99)
    assert push(run) == 5
    out = capsys.readouterr().out
    command = f"python scripts/push_to_hub.py {run} --hub_model_id lab/model"
    assert (
        f"push failed: {says}" in out
        and f"(HTTP {status})" in out
        and out.rstrip().endswith(f"push later with: {command}")
    )
    recorded = read_status(run)
    assert (recorded["state"], recorded["exit_code"], recorded["step"]) == ("push_failed", 5, 4)
    assert says in recorded["message"] and command in recorded["message"]
    assert hub.count("POST .*/commit/") == (4 if status in (409, 429, 500) else 1)  # only what may pass is tried again
    assert not files(hub), "a repository is never half-written"

    if status != 500:
        return
    hub.faults.clear()
    sent = hub.received
    assert push_to_hub.main(command.split()[2:]) == 0  # the command that was printed
    assert hub.received == sent, "what had arrived was sent again"
    assert read_status(run)["state"] == "done" and "model.safetensors" in files(hub)


@pytest.mark.parametrize("status", [409, 429, 500])
def test_a_fault_that_passes_is_waited_for(hub, run, capsys, status):
    hub.fault("POST .*/commit/", status, times=2)
    out = pushed_after(hub, run, capsys)
    assert out.count("again in 0 s, what has arrived is kept") == 2


def test_a_connection_cut_in_the_middle_of_a_large_file(hub, run, capsys, caplog):
    hub.part_size = 100_000
    hub.fault(r"PUT /lfs/\w+/3", "cut")
    pushed_after(hub, run, capsys)
    assert hub.count(r"PUT /lfs/\w+/3") > hub.count(r"PUT /lfs/\w+/2")
    size = (run / "model.safetensors").stat().st_size
    assert hub.received < 1.5 * size + 400_000, "parts that had arrived were sent again"


def test_a_line_that_stays_cut_leaves_the_model_and_the_next_push_sends_the_rest(hub, run, capsys, monkeypatch):
    once = _http.http_backoff.__kwdefaults__ | {"max_retries": 0}  # otherwise it takes half a minute
    monkeypatch.setattr(_http.http_backoff, "__kwdefaults__", once)
    monkeypatch.setattr(client, "RETRY_SECONDS", ())
    weights = load_file(run / "model.safetensors")
    half = len(weights) // 2
    names = sorted(weights)
    index = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate((names[:half], names[half:]), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, run / file, {"format": "pt"})
        index["weight_map"] |= dict.fromkeys(part, file)
    (run / "model.safetensors").unlink()
    (run / "model.safetensors.index.json").write_text(json.dumps(index))
    second = hashlib.sha256((run / "model-00002-of-00002.safetensors").read_bytes()).hexdigest()
    hub.fault(f"PUT /lfs/{second}", "cut", times=99)
    assert push(run) == 5
    assert "push failed: the connection broke" in capsys.readouterr().out
    assert read_status(run)["state"] == "push_failed" and not files(hub)
    hub.faults.clear()
    hub.log.clear()
    assert push(run) == 0
    assert [line for line in hub.log if line.startswith("PUT")] == [f"PUT /lfs/{second}"]
    loaded = AutoModelForCausalLM.from_pretrained("lab/model")
    assert torch.equal(answer(loaded), answer(AutoModelForCausalLM.from_pretrained(run)))


def test_a_slow_server_is_not_waited_for_without_end(hub, run, capsys, monkeypatch):
    monkeypatch.setattr(client, "UPLOAD_SECONDS", 0.5)
    hub.fault("POST .*/commit/", "slow", seconds=1.0)
    out = pushed_after(hub, run, capsys)
    assert "the Hub was silent for too long; again in 0 s" in out


def test_a_failure_inside_hf_xet_is_one_line_too(hub, run, capsys, monkeypatch):
    """The server does not speak xet: what hf_xet raises then must end as any other failed push."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(client, "RETRY_SECONDS", ())
    assert push(run) == 5
    out = capsys.readouterr().out
    assert "push failed: " in out and "push later with: " in out
    assert hub.count("GET .*/xet-write-token") and not files(hub)


def test_weights_that_could_run_code_are_not_loaded(tiny_folder, tmp_path, capsys):
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "m"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    needed = [
        "--model_name_or_path",
        str(folder),
        "--dataset_name",
        "d",
        "--use_cpu",
        "--output_dir",
        str(tmp_path / "o"),
    ]
    assert train_dpo.main([str(part) for part in needed]) == 2
    assert "holds its weights as .bin, which can run code" in capsys.readouterr().err


# ---- sharded checkpoints


@pytest.mark.parametrize("architecture", ["gpt_neox", "olmoe"])
def test_fsdp_shards_are_put_together_under_the_names_that_load(tiny_folder, tmp_path, architecture):
    """What accelerate writes under FSDP's SHARDED_STATE_DICT, here by one process; ZeRO: tests/e2e/test_resume.py."""
    base = tiny_folder(architecture)
    model = AutoModelForCausalLM.from_pretrained(base)
    checkpoint, whole = tmp_path / "checkpoint-3", tmp_path / "whole"
    whole.mkdir()
    for name in ("config.json", "generation_config.json"):
        checkpoint.mkdir(exist_ok=True)
        shutil.copy(base / name, checkpoint)
    state = {"model": model.state_dict()}
    torch.distributed.checkpoint.save(state, checkpoint_id=checkpoint / "pytorch_model_fsdp_0", no_dist=True)
    consolidate(checkpoint, whole)
    loaded, info = AutoModelForCausalLM.from_pretrained(whole, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(answer(loaded), answer(model))
    assert load_file(whole / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
