"""Reports: what a set of lengths costs under every strategy, as one page with figures."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from shardgen.errors import UserError


def render(data: dict[str, Any], subject: str, command: str) -> str:
    """The page as HTML.

    Args:
        data: What :func:`shardgen.report_data.collect` returns.
        subject: What the report is about.
        command: The command line that makes it again.
    """
    try:
        from shardgen.report_page import page
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise UserError("a report needs matplotlib: install it with pip install matplotlib") from error
    return page(data, subject, command)


def write_report(out: str | Path, html: str) -> None:
    """Put a page in its place at once: a reader sees the old one or the whole new one.

    Raises:
        UserError: ``out`` is a directory, or its folder is missing.
    """
    out = Path(out)
    check_out(out)
    handle, name = tempfile.mkstemp(prefix=f".{out.name}.", dir=out.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(html)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, out)
    except BaseException:
        os.unlink(name)
        raise


def check_out(out: Path) -> None:
    """Refuse a place for the page before any work is done."""
    if out.is_dir():
        raise UserError(f"--out {out} is a directory: name a file, such as {out / 'report.html'}")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: there is no directory {out.parent}, make it first")
