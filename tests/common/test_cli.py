"""What a script's main returns, however it ends."""

import sys

import pytest

from sfm_dpo.common.cli import command
from sfm_dpo.common.errors import GuardStopped


@pytest.mark.parametrize(
    ("end", "code", "line"),
    [
        (None, 0, ""),
        (3, 3, ""),
        (GuardStopped("too bad: hf_" + "a" * 34), 4, "error: too bad: ***\n"),
        (KeyboardInterrupt(), 130, "\ninterrupted\n"),
    ],
)
def test_command_returns_the_exit_code(capsys, monkeypatch, end, code, line):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    @command
    def main(argv):
        if isinstance(end, BaseException):
            raise end
        return end

    assert main([]) == code
    assert capsys.readouterr() == ("", line)
