"""Runs that push, as processes: checkpoints meanwhile, a Hub that is down at the end, and no secret left anywhere."""

import threading

import psutil

from sfm_dpo.common.secrets import load_env_file
from tests.hub_server import TOKEN

# Found nowhere: tokens by their names, and what only .env holds.
CANARIES = {
    "HF_TOKEN": TOKEN,
    "WANDB_API_KEY": "wandbCanary0123456789abcdef0123456789abcd",
    "MAIL_PASSWORD": "mailCanary123456",
    "CHAT_HOOK": "https://chat.example/hookCanary123456",
}


def leaks(data: bytes) -> set[str]:
    return {name for name, value in CANARIES.items() if value.encode() in data}


def watch_command_lines(shown: set[str], over: threading.Event) -> None:
    """Adds the canaries that stand in any command line, as `ps` shows them, until the event is set."""
    while not over.wait(0.2):
        for process in psutil.process_iter(["cmdline"]):
            shown.update(leaks(" ".join(process.info["cmdline"] or []).encode()))


def test_a_final_push_fails_and_no_secret_is_left(place, train_here, hub, tmp_path, monkeypatch):
    """A checkpoint is pushed before. The secrets are in .env, which others can read."""
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("".join(f"{name}={value}\n" for name, value in CANARIES.items()))
    (tmp_path / ".env").chmod(0o644)
    (tmp_path / "wandb").mkdir()
    env = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "WANDB_MODE": "offline"}
    env |= {"WANDB_DIR": str(tmp_path / "wandb")}
    fields = {"report_to": "wandb", "max_steps": 4, "push_to_hub": "true", "hub_model_id": "lab/model"}
    fields |= {"hub_strategy": "every_save", "hub_revision": "step-{step}"}
    shown: set[str] = set()
    over = threading.Event()
    threading.Thread(target=watch_command_lines, args=(shown, over), daemon=True).start()
    hub.fault("POST .*/commit/main", 403, times=99)
    run = place.start("pushed", env=env, popen={"cwd": tmp_path}, **fields)
    code = run.wait()
    over.set()
    assert code == 5 and not shown, run.log[-3000:]
    status = run.status
    hub.faults.clear()
    assert set(hub.repos["lab/model"].branches) == {"main", "step-2"}  # step 4 is the end, which goes to main
    assert "model.safetensors" in hub.repos["lab/model"].files("step-2")
    load_env_file()
    again = train_here("pushed", **fields)  # nothing is trained, and now it is pushed
    broken = train_here("push-broken", 2, model_name_or_path=f"no/{CANARIES['MAIL_PASSWORD']}")
    assert not leaks((run.log + again.log + broken.log).encode())
    for folder in (run.folder, broken.folder, tmp_path):
        for path in folder.rglob("*"):
            assert path.name == ".env" or not path.is_file() or not leaks(path.read_bytes()), path
    for repo in hub.repos.values():
        assert not [name for files in repo.commits.values() for name, file in files.items() if leaks(file)]
    assert list((tmp_path / "wandb").rglob("*.wandb"))
    assert broken.status["state"] == "failed" and "***" in broken.status["message"]
    assert f"warning: {tmp_path}/.env is readable by others (mode 644): chmod 600" in run.log

    command = f"python scripts/push_to_hub.py {run.folder} --hub_model_id lab/model"
    assert (status["state"], status["exit_code"], status["step"]) == ("push_failed", 5, 4)
    assert status["open"] == ["pushed"] and again.status["open"] == []
    assert "403 Forbidden" in status["message"]
    assert command in status["message"] and command in run.log
    assert "already done" in again.log and "step 1/4" not in again.log
    assert again.status["pushed"].startswith(f"{hub.url}/lab/model/commit/")


def test_other_trackers_get_the_metrics(train_here, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = train_here("tracked", report_to=["tensorboard", "trackio"], project="canary", max_steps=2)
    for files in (run.folder.rglob("events.out.tfevents.*"), (tmp_path / "trackio").rglob("canary*")):
        assert any(b"rewards/margins" in path.read_bytes() for path in files if path.is_file()), run.log[-2000:]
