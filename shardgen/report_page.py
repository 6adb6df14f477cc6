"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from shardgen import __version__
from shardgen.report_canvas import NARROW, WIDE
from shardgen.report_figures import draw
from shardgen.report_style import inline_svg, style_sheet
from shardgen.report_words import conclusions

Json = dict[str, Any]


def page(data: Json, subject: str, command: str) -> str:
    """The report as HTML.

    Args:
        data: What :func:`shardgen.report_data.collect` returns.
        subject: What the report is about, for its title.
        command: The command line that makes the same report again.
    """
    title = escape(subject)
    figures = "".join(
        f'<script type="application/json" id="data-{name}">{_script(values)}</script>\n'
        for name, values in data.items()
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Length report: {title}</title>\n"
        f"<style>\n{style_sheet(len(data['buckets']['buckets']))}</style>\n</head>\n"
        f"<body>\n<main>\n{_head(data, title)}{''.join(section(data) for section in SECTIONS)}"
        f"<footer>shardgen {__version__} &middot; <code>{escape(command)}</code></footer>\n</main>\n"
        f"{figures}</body>\n</html>\n"
    )


def _script(values: Json) -> str:
    # "</" would end the script element early.
    return json.dumps(values, allow_nan=False, separators=(",", ":")).replace("</", "<\\/")


def _head(data: Json, title: str) -> str:
    setting, loader = data["setting"], data["strategies"]["loader"]
    facts = [
        f"{setting['num_samples']:,} samples",
        f"{setting['num_tokens']:,} tokens",
        f"token budget {setting['token_budget']:,}",
        f"{setting['world_size']} {'rank' if setting['world_size'] == 1 else 'ranks'}"
        f" &times; {setting['accumulate']} {'micro-step' if setting['accumulate'] == 1 else 'micro-steps'}",
        f"lookahead {setting['lookahead']}",
        *(["packed layout"] if setting["layout"] == "packed" else []),
        *(["static shapes"] if setting["padding"] == "boundary" else []),
    ]
    tiles = (
        ("Padding efficiency", f"{loader['padding_efficiency']:.1%}"),
        ("Rank balance", f"{loader['rank_balance']:.1%}"),
        ("Overall", f"{loader['overall']:.1%}"),
        ("Recurrence", f"{loader['recurrence']:.4f}"),
    )
    shown = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in tiles)
    words = "".join(f"<li>{_options_whole(escape(sentence))}</li>" for sentence in conclusions(data))
    breakable = re.sub(r"([_.-])(?=\w)", r"\1<wbr>", title)
    return (
        f'<h1>{breakable}</h1>\n<p class="sub">{" &middot; ".join(facts)}</p>\n'
        f'<dl class="tiles">{shown}</dl>\n'
        f'<h2>In short</h2>\n<ul class="words">{words}</ul>\n'
    )


def _options_whole(text: str) -> str:
    """Options of the command line set as code, never broken inside."""
    return re.sub(r"--[a-z][a-z-]*(?: (?:\d+|boundary))?", r"<code>\g<0></code>", text)


def _figure(data: Json, name: str, label: str) -> str:
    wide = inline_svg(draw(name, data, WIDE), f"{name}-wide", escape(label))
    narrow = inline_svg(draw(name, data, NARROW), f"{name}-narrow", escape(label))
    return f'<figure id="{name}"><div class="wide">{wide}</div><div class="narrow">{narrow}</div></figure>\n'


def _legend(data: Json) -> str:
    items = "".join(
        f'<li><span class="swatch" style="background:var(--b{k})"></span>'
        f"{bucket['lower'] + 1:,}&ndash;{bucket['upper']:,}</li>"
        for k, bucket in enumerate(data["buckets"]["buckets"])
    )
    return f'<ul class="legend" aria-label="Buckets by length">{items}</ul>\n'


def _table(head: Sequence[tuple[str, bool]], rows: Sequence[str], foot: str = "") -> str:
    """A table; columns marked True are left out where the page is narrow."""
    cells = "".join(f'<th scope="col"{_more(more)}>{name}</th>' for name, more in head)
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(rows)}</tbody>{foot}</table>\n"


def _more(more: bool) -> str:
    return ' class="more"' if more else ""


def _row(head: Sequence[tuple[str, bool]], values: Sequence[str], *, ours: bool = False) -> str:
    cells = "".join(
        f'<th scope="row">{value}</th>' if not number else f"<td{_more(more)}>{value}</td>"
        for number, (value, (_, more)) in enumerate(zip(values, head, strict=True))
    )
    return f"<tr{' class=ours' if ours else ''}>{cells}</tr>"


def _lengths(data: Json) -> str:
    return (
        "<h2>Lengths and boundaries</h2>\n"
        '<p class="note">How many samples have each length. Dashed lines are the boundaries; colours are the '
        "buckets, here and below.</p>\n"
        + _figure(data, "lengths", "Histogram of sample lengths with bucket boundaries")
        + _legend(data)
    )


def _buckets(data: Json) -> str:
    head = (
        ("bucket", False), ("samples", False), ("share", True), ("tokens", True), ("share of tokens", False),
        ("mean length", True), ("rows per batch", False), ("efficiency without lookahead", False),
    )  # fmt: skip
    buckets = data["buckets"]["buckets"]
    num_samples, num_tokens = data["setting"]["num_samples"], data["setting"]["num_tokens"]
    rows = [
        _row(
            head,
            (
                f'<span class="swatch" style="background:var(--b{k})"></span>'
                f"{b['lower'] + 1:,}&ndash;{b['upper']:,}",
                f"{b['num_samples']:,}",
                f"{b['num_samples'] / num_samples:.1%}",
                f"{b['num_tokens']:,}",
                f"{b['num_tokens'] / num_tokens:.1%}",
                f"{b['mean_length']:,.1f}",
                f"{b['batch_size']:,}",
                f"{b['padding_efficiency']:.1%}" if b["num_samples"] else "&ndash;",
            ),
        )
        for k, b in enumerate(buckets)
    ]
    whole = _row(
        head,
        (
            "all", f"{num_samples:,}", "100.0%", f"{num_tokens:,}", "100.0%",
            f"{num_tokens / num_samples:,.1f}", "", f"{data['curve']['padding_efficiency']:.1%}",
        ),
    )  # fmt: skip
    return (
        "<h2>Buckets</h2>\n"
        '<p class="note">Rows per batch: as many as fit the token budget when the batch holds the longest '
        "sample of its bucket; batches of shorter samples have more.</p>\n" + _table(head, rows, whole)
    )


def _curve(data: Json) -> str:
    head = (("boundaries", False), ("upper bounds", True), ("efficiency without lookahead", False))
    curve = data["curve"]
    several = len(curve["curve"]) > 1  # else there is but one length
    named = {"these": curve, **curve["alternatives"]}
    spelled = {"hand": "hand-picked", "quantile": "equal counts", "equal_token": "equal tokens"}
    rows = [
        _row(
            head,
            (
                spelled.get(name, name),
                ", ".join(f"{bound:,}" for bound in choice["boundaries"][1:][:12])
                + (" &hellip;" if len(choice["boundaries"]) > 13 else ""),
                f"{choice['padding_efficiency']:.1%}",
            ),
            ours=name == "these",
        )
        for name, choice in named.items()
    ]
    return (
        "<h2>How many buckets</h2>\n"
        '<p class="note">The best boundaries of every number of buckets, and what common rules reach with as '
        "many as here.</p>\n"
        + (_figure(data, "curve", "Padding efficiency by number of buckets") if several else "")
        + _table(head, rows)
    )


def _strategies(data: Json) -> str:
    head = (
        ("strategy", False), ("steps", False), ("batches", True), ("shapes", False), ("dropped", False),
        ("repeated", True), ("fillers", False), ("planned in", True),
    )  # fmt: skip
    rows = [
        _row(
            head,
            (
                name,
                *(f"{s[key]:,}" for key in ("num_steps", "num_batches", "num_shapes", "dropped", "repeated")),
                f"{s['fillers']:,}",
                f"{s['plan_seconds']:.2f} s",
            ),
            ours=name == "loader",
        )
        for name, s in data["strategies"].items()
    ]
    return (
        "<h2>Strategies side by side</h2>\n"
        '<p class="note">Overall is padding efficiency times rank balance: the part of the ranks&rsquo; time '
        "spent on real tokens. Recurrence: of the pairs that share a batch, the part that meets again in the "
        "next epoch. Step divergence: how far a step&rsquo;s lengths are from the corpus&rsquo;s, 0 to 1."
        "</p>\n"
        + _figure(data, "strategies", "Padding efficiency, rank balance, recurrence and divergence")
        + _table(head, rows)
    )


def _frontier(data: Json) -> str:
    if not data["frontier"]["points"]:
        return ""
    head = (
        ("buckets", False), ("lookahead", False), ("padding", True), ("overall", False),
        ("recurrence", False), ("divergence", False),
    )  # fmt: skip
    here = (data["frontier"]["num_buckets"], data["frontier"]["lookahead"])
    rows = [
        _row(
            head,
            (
                f"{p['num_buckets']}", f"{p['lookahead']}", f"{p['padding_efficiency']:.1%}",
                f"{p['overall']:.1%}", f"{p['recurrence']:.4f}", f"{p['step_divergence']:.3f}",
            ),
            ours=(p["num_buckets"], p["lookahead"]) == here,
        )
        for p in data["frontier"]["points"]
    ]  # fmt: skip
    return (
        "<h2>Buckets and lookahead</h2>\n"
        '<p class="note">A longer lookahead sorts more samples at a time: less padding, and the same samples '
        "meet more often. Each line is a number of buckets with its best boundaries.</p>\n"
        + _figure(data, "frontier", "Overall efficiency and recurrence by lookahead and number of buckets")
        + f"<details><summary>All {len(rows)} combinations</summary>{_table(head, rows)}</details>\n"
    )


def _composition(data: Json) -> str:
    return (
        "<h2>What steps are made of</h2>\n"
        '<p class="note">Share of each step&rsquo;s tokens by bucket, for consecutive steps inside an '
        "epoch. The more alike the steps, the steadier the loss.</p>\n"
        + _figure(data, "composition", "Tokens of single steps by bucket, under every strategy")
        + '<p class="note after">The loader over the whole epoch, steps averaged in groups: level '
        " where no part of the epoch is short or long.</p>\n"
        + _figure(data, "epoch", "Tokens by bucket over the epoch of the loader")
        + _legend(data)
    )


def _shapes(data: Json) -> str:
    if len(data["shapes"]["choices"]) < 2:
        return ""
    return (
        "<h2>Tensor shapes</h2>\n"
        '<p class="note">A compiler or a graph capture pays once per shape. Rounding padded lengths up, or '
        "one shape per bucket, makes fewer. Bars of shapes are logarithmic.</p>\n"
        + _figure(data, "shapes", "Distinct shapes and padding efficiency by rounding")
    )


SECTIONS: tuple[Callable[[Json], str], ...] = (
    _lengths,
    _buckets,
    _curve,
    _strategies,
    _frontier,
    _composition,
    _shapes,
)
