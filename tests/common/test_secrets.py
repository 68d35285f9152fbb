"""What counts as a secret, and what stays legible."""

import os
from pathlib import Path

import pytest

from sfm_dpo.common.secrets import check_env_file, env_file, mask, warn_of_open_env_file


@pytest.fixture
def write_env(tmp_path, monkeypatch):
    """A function: text -> .env with it in the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, mode: int = 0o600):
        (tmp_path / ".env").write_text(text)
        (tmp_path / ".env").chmod(mode)

    return write


def test_secrets_are_masked_and_settings_stay(write_env, monkeypatch):
    write_env(
        "OTHER=from-the-file\nHF_HOME=/shared/huggingface\nWANDB_PROJECT=my-project\nSMTP_PASSWORD=longenough\nN=12\n"
    )
    monkeypatch.setenv("MY_API_KEY", "key-value-1")
    monkeypatch.setenv("MY_API_KEY_2", "key-value-1-longer")
    text = "from-the-file /shared/huggingface my-project longenough 12 key-value-1 key-value-1-longer hf_" + "a" * 34
    assert mask(text) == "*** /shared/huggingface my-project *** 12 *** *** ***"


def test_a_traceback_is_masked(tmp_path):
    import subprocess
    import sys

    code = "import sys; from sfm_dpo.common.secrets import mask_traceback; sys.excepthook = mask_traceback\n"
    code += "import os; raise ValueError(os.environ['HF_TOKEN'])"
    env = os.environ | {"HF_TOKEN": "hf_canaryInTraceback"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ValueError: ***" in done.stderr and "canaryIn" not in done.stderr


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_an_env_file_that_others_can_read(write_env, capsys, mode, warned):
    write_env("X=1\n", mode)
    warn_of_open_env_file()
    error = capsys.readouterr().err
    assert (f"can be read by others (mode {mode:o}): chmod 600" in error) is warned and error.count("\n") == warned


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"X=1\nHF_TOKEN hf_secret\n", "line 2 is not NAME=value"),
        (b'HF_TOKEN="hf_secret\nX=1\n', "line 1 is not NAME=value"),
        (b"\xff\xfeX", "cannot be read ('utf-8' codec"),
    ],
)
def test_an_env_file_that_would_be_read_in_part_ends_the_command(write_env, tmp_path, capsys, content, said):
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        check_env_file()
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.startswith(f"error: {tmp_path}/.env: {said}") and error.count("\n") == 1
    assert "hf_secret" not in error


def test_a_whole_env_file_and_none_are_fine(write_env, tmp_path):
    check_env_file()
    assert env_file() == Path(__file__).parents[2] / ".env"  # the project's, from wherever a command is typed
    write_env("# a comment\n\nexport X=1\nHF_TOKEN=\nQUOTED='a b'\n")
    check_env_file()
    assert env_file() == tmp_path / ".env"
