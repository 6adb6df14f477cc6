"""The command line: ``python -m shardgen`` and ``shardgen``. Commands are imported when they are called."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import click

from shardgen import __version__
from shardgen.errors import UserError

# name: (module, function, one line of help). The help stands here so that `--help` imports nothing.
COMMANDS = {
    "build": ("shardgen.cli_build", "build_command", "Write length-bucketed shards."),
    "verify": ("shardgen.cli_verify", "verify_command", "Check a build, file by file and row by row."),
    "simulate": ("shardgen.cli_simulate", "simulate_command", "Compare strategies on your lengths."),
    "explain": (
        "shardgen.cli_explain",
        "explain_command",
        "Tell what a batch holds, or where a sample goes.",
    ),
    "optimize": ("shardgen.cli_optimize", "optimize_command", "Find the best bucket boundaries."),
    "report": ("shardgen.cli_report", "report_command", "Show all of it on one page, with figures."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name, _ = COMMANDS[cmd_name]
        command = getattr(importlib.import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="shardgen")
@click.option("--debug", is_flag=True, help="Show a traceback when something fails (anywhere on the line).")
def cli(debug: bool) -> None:
    """Length buckets for PyTorch and MosaicML Streaming: best boundaries, and shards to train from."""


def _one_line(text: str) -> str:
    return " ".join(text.split())


def describe_error(error: BaseException) -> str:
    """What went wrong in one line, with a way out."""
    if isinstance(error, UserError):
        return _one_line(str(error))
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _one_line(f"{text}: free some space or choose another --out")
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return _one_line(f"{text}: choose a place you may write to")
        return _one_line(text)
    if isinstance(error, MemoryError):
        return "out of memory: use a smaller --memory or fewer --workers"
    return _one_line(f"{type(error).__name__}: {error} (--debug shows where; please report it)")


def _terminated(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def run(arguments: Sequence[str]) -> int:
    """Run one command; 0 done, 1 an ``error:`` line, 2 a wrong call."""
    arguments = list(arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        cli.main(arguments, prog_name="shardgen", standalone_mode=False)
        sys.stdout.flush()
        return 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as error:
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output left; nothing more can be said, and Python would say it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
        print(f"error: {describe_error(error)}", file=sys.stderr, flush=True)
        return 1


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run(sys.argv[1:]))
