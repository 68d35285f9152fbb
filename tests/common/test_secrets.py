"""What counts as a secret, and what stays legible."""

import os
import subprocess
import sys

import pytest

from sfm_dpo.common import secrets
from sfm_dpo.common.files import PROJECT
from sfm_dpo.common.secrets import load_env_file, mask, mask_traceback


@pytest.fixture
def write_env(tmp_path, monkeypatch):
    """A function: text -> .env with it in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, mode: int = 0o600):
        (tmp_path / ".env").write_text(text, "latin-1")
        (tmp_path / ".env").chmod(mode)

    return write


def test_what_is_named_like_a_secret_and_looks_like_one_is_masked(write_env, tmp_path, monkeypatch, environment):
    named = {"SMTP_PASSWORD": "longenough", "MY_API_KEY": "key-value-1", "MY_API_KEY_2": "key-value-1-longer"}
    ordinary = {"MODEL_DIR": "/models/base", "HF_TOKEN_PATH": "/home/me/token", "SSH_KEY": str(tmp_path)}
    ordinary |= {"N_KEYS": "7", "MAX_TOKENS": "100000000", "TOKENIZER": "org/tokenizer", "WANDB_PROJECT": "my-project"}
    write_env("".join(f"{name}={value}\n" for name, value in (named | ordinary).items()))
    load_env_file()
    text = " ".join([*ordinary.values(), *named.values(), "hf_" + "a" * 34])
    assert mask(text) == " ".join([*ordinary.values(), "*** *** *** ***"])


def test_a_traceback_is_masked(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_canaryInTraceback")
    mask_traceback(ValueError, ValueError("no access: hf_canaryInTraceback"), None)
    assert capsys.readouterr().err == "ValueError: no access: ***\n"


def test_ctrl_c_while_libraries_are_imported_is_one_line_and_its_exit_code():
    command = [sys.executable, "-c", "import sfm_dpo; sfm_dpo.setup(); raise KeyboardInterrupt"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, True), (0o604, True)])
def test_an_env_file_that_others_can_read(write_env, capsys, environment, mode, warns):
    write_env("# für mich\n\nexport X=1\nHF_TOKEN=\nQUOTED='a b'\n", mode)
    load_env_file()
    error = capsys.readouterr().err
    assert (f"is readable by others (mode {mode:o}): chmod 600" in error) is warns and error.count("\n") == warns
    assert (os.environ["X"], os.environ["QUOTED"]) == ("1", "a b")


def test_only_ones_own_files_here_and_in_the_project_are_read(write_env, tmp_path, monkeypatch, environment, capsys):
    monkeypatch.setattr(secrets, "PROJECT", tmp_path / "project")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".env").write_text("WHERE=project\nMORE=1\n")
    (tmp_path / "project" / ".env").chmod(0o600)
    write_env("WHERE=here\n")
    load_env_file()
    assert (os.environ.pop("WHERE"), os.environ.pop("MORE")) == ("here", "1")
    monkeypatch.chdir(tmp_path / "project")  # .env is in the folder above, too
    load_env_file()
    assert os.environ.pop("WHERE") == "project"
    assert not capsys.readouterr().err
    monkeypatch.setattr(secrets, "PROJECT", tmp_path / "none")
    file = tmp_path / "project" / ".env"
    for mode in (0o620, 0o602, 0o600):
        file.chmod(mode)
        if mode == 0o600:  # another user's
            monkeypatch.setattr(os, "getuid", lambda: 4711)
            if file.stat().st_uid == 0:
                os.chown(file, 4712, -1)
        load_env_file()
        assert "WHERE" not in os.environ
        assert f"not read: others own it or can change it (mode {mode:o})" in capsys.readouterr().err
