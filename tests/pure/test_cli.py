"""The command line: what needs no process."""

import re

import pytest

import shoal as library
from helpers.command import Caller

COMMANDS = ("train", "run", "verify", "report", "runs")


def help_of(call: Caller, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        call(*arguments)
    assert left.value.code == 0
    return capsys.readouterr().out


# -- help -------------------------------------------------------------------------------------------------------------


def test_version(call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(call, capsys, "--version") == f"shoal {library.__version__}\n"


def test_help_names_every_command_and_an_example(call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(call, capsys, "--help")
    for name in COMMANDS:
        assert re.search(rf"^(Run|After)? +{name}\b", text, re.MULTILINE)
    assert "example: shoal train" in text
    assert call("").code == 2
    assert call().out == text, "no command at all: the same help"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name: str, call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of(call, capsys, name, "--help")
    assert f"example: shoal {name}" in text
    assert f"usage: shoal {name}" in text


RARE = ("--nonfinite", "--checkpoint-every", "--stop-after", "--timeout", "--pin", "--inexact", "--json", "--plain")


@pytest.mark.parametrize("name", ["train", "run"])
def test_rare_options_are_shown_when_asked_for(name: str, call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    short = help_of(call, capsys, name, "--help")
    full = help_of(call, capsys, name, "--help-all")
    for option in ("--workers", "--shares", "--plan", "--run-dir", "--resume", "--log", "--tensorboard"):
        assert option in short
        assert option in full
    for option in RARE:
        assert option not in short
        assert re.search(rf"{option}\b.*\n? +\S", full), f"{option} is explained"
