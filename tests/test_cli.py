"""The command line as people meet it: help, examples, exit codes, and what a pipe sees."""

import re
import shlex

import numpy as np
import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from shardgen.cli import COMMANDS, cli, run
from shardgen.console import _Count, _Rate, _Time, stderr_console


def examples(name):
    """The calls that a command's help shows."""
    text = cli.get_command(None, name).help
    return [line.strip() for line in text.splitlines() if line.strip().startswith(f"shardgen {name} ")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_examples(name, capsys):
    assert run([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"Usage: shardgen {name} ") and err == ""
    assert "--json" in out or name == "report"
    shown = examples(name)
    assert len(shown) >= 2
    for example in shown:
        assert example in out, "the help breaks the line"
        assert len(example) <= 100


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_calls_that_the_command_takes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loader.json").touch()  # some options take existing files only
    command = cli.get_command(None, name)
    for example in examples(name):
        words = shlex.split(example)
        context = command.make_context(name, words[2:])  # a wrong option or value raises
        assert context.params


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    command = cli.get_command(None, name)
    options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
    assert [option.opts for option in options if not option.help] == []


def test_the_list_of_commands_is_the_help(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, _, text) in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", out, re.MULTILINE)
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shardgen, version ")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing"], 2, "No such command 'nothing'"),
        (["optimize"], 2, "Missing argument"),
        (["optimize", "x.npy", "--nothing"], 2, "No such option"),
        (["optimize", "x.npy"], 1, "error: x.npy cannot be read"),
        (["verify", "nowhere"], 1, "error: nowhere does not exist"),
        (["explain", "nowhere", "--sample", "1"], 1, "error: nowhere is not a dataset"),
    ],
)
def test_exit_codes(arguments, code, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == "" and message in err.replace("\n", " ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(capsys):
    assert run(["optimize", "x.npy", "--debug"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("error: x.npy cannot be read")


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimize", "lengths.npy", "--json"],
        ["simulate", "lengths.npy", "--strategies", "loader", "--world-size", "2", "--json"],
        ["report", "lengths.npy", "--out", "report.html", "--no-frontier", "--world-size", "2"],
    ],
)
def test_a_pipe_sees_neither_colours_nor_bars(arguments, shardgen_cli, tmp_path, root):
    np.save(tmp_path / "lengths.npy", np.arange(1, 3000) % 700 + 1)
    finished = shardgen_cli(
        *arguments,
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
    )
    assert finished.returncode == 0, finished.stderr
    for text in (finished.stdout, finished.stderr):
        assert "\x1b" not in text and "\r" not in text and "\u2501" not in text
    if "--json" in arguments:
        assert len(finished.stdout.splitlines()) == 1
    else:
        assert finished.stdout == ""


def test_names_with_brackets_are_shown_whole(capsys):
    stderr_console().print("out[1]/[bold]x: whole")
    assert capsys.readouterr().err == "out[1]/[bold]x: whole\n"


def test_a_bar_tells_count_rate_and_time():
    clock = [0.0]
    with Bars(console=Console(quiet=True), get_time=lambda: clock[0], auto_refresh=False) as bars:
        known, unknown = bars.add_task("known", total=5000), bars.add_task("unknown", total=None)
        for second in range(1, 5):
            clock[0] = float(second)
            bars.advance(known, 300)
            bars.advance(unknown, 2)
        one, other = bars.tasks
        assert str(_Count().render(one)) == "1,200/5,000"
        assert str(_Rate().render(one)) == "300/s"
        assert str(_Time().render(one)) == "0:00:13 left"
        assert str(_Count().render(other)) == "8"
        assert str(_Rate().render(other)) == "2.0/s"
        assert str(_Time().render(other)) == "4 s"
