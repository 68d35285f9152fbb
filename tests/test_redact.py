"""What counts as a secret, and what stays legible."""

import os

import pytest

from sfm_dpo.redact import mask, warn_of_open_env_file


@pytest.fixture
def env_file(tmp_path, monkeypatch):
    """A function: text -> .env with it in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, mode: int = 0o600):
        (tmp_path / ".env").write_text(text)
        (tmp_path / ".env").chmod(mode)

    return write


def test_secrets_are_masked_and_settings_stay(env_file, monkeypatch):
    env_file(
        "OTHER=from-the-file\nHF_HOME=/shared/huggingface\nWANDB_PROJECT=my-project\nSMTP_PASSWORD=longenough\nN=12\n"
    )
    monkeypatch.setenv("MY_API_KEY", "key-value-1")
    monkeypatch.setenv("MY_API_KEY_2", "key-value-1-longer")
    text = "from-the-file /shared/huggingface my-project longenough 12 key-value-1 key-value-1-longer hf_" + "a" * 34
    assert mask(text) == "*** /shared/huggingface my-project *** 12 *** *** ***"


def test_a_traceback_is_masked(tmp_path):
    import subprocess
    import sys

    code = "import sys; from sfm_dpo.redact import mask_traceback; sys.excepthook = mask_traceback\n"
    code += "import os; raise ValueError(os.environ['HF_TOKEN'])"
    env = os.environ | {"HF_TOKEN": "hf_canaryInTraceback"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: ***" in done.stderr and "canaryIn" not in done.stderr


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_an_env_file_that_others_can_read(env_file, capsys, mode, warned):
    env_file("X=1\n", mode)
    warn_of_open_env_file()
    error = capsys.readouterr().err
    assert (f"can be read by others (mode {mode:o}): chmod 600" in error) is warned and error.count("\n") == warned
