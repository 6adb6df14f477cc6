"""The page of a report: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from shardgen import __version__
from shardgen.report_figures import NARROW, WIDE, draw
from shardgen.report_style import FONT, inline_svg, style_sheet
from shardgen.report_words import conclusions

Json = dict[str, Any]

STYLE = (
    "*{box-sizing:border-box}\n"
    f"body{{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 {FONT};"
    "-webkit-text-size-adjust:100%}\n"
    """main{max-width:908px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.01em;margin:0 0 6px;overflow-wrap:anywhere;text-wrap:pretty}
h2{font-size:20px;line-height:1.3;margin:52px 0 4px}
p{margin:0 0 16px;max-width:70ch}
.sub,.note,footer{color:var(--muted)}
.note{font-size:15px}
.sub{font-size:15px;margin:0;max-width:none}
dl.tiles{display:grid;grid-template-columns:repeat(4,1fr);gap:12px;margin:28px 0 0}
.tiles div{background:var(--panel);border-radius:8px;padding:14px 16px}
.tiles dt{color:var(--muted);font-size:14px;line-height:1.3}
.tiles dd{margin:4px 0 0;font-size:26px;line-height:1.15;font-weight:650;font-variant-numeric:tabular-nums}
ul.words{margin:10px 0 0;padding:0;list-style:none}
.words li{padding:9px 0;border-top:1px solid var(--line);max-width:none}
.words li:first-child{border-top:0;font-weight:600}
figure{margin:18px 0 0}
svg{display:block;width:100%;height:auto}
.narrow{display:none;max-width:520px;margin:0 auto}
ul.legend{display:flex;flex-wrap:wrap;gap:4px 18px;margin:14px 0 0;padding:0;list-style:none;
 font-size:14px;color:var(--muted);font-variant-numeric:tabular-nums}
.swatch{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:7px}
table{border-collapse:collapse;width:100%;margin:18px 0 0;font-size:15px;line-height:1.35;
 font-variant-numeric:tabular-nums}
th,td{padding:8px 0 8px 14px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{padding-left:0;text-align:left}
thead th{color:var(--muted);font-weight:500;font-size:14px;vertical-align:bottom;white-space:normal}
tbody th{font-weight:500}
tr.ours th,tr.ours td{color:var(--accent);font-weight:650}
tfoot th,tfoot td{border-bottom:0;color:var(--muted);font-weight:500}
details{margin:18px 0 0}
summary{cursor:pointer;color:var(--muted);font-size:15px}
footer{margin:56px 0 0;padding:16px 0 0;border-top:1px solid var(--line);font-size:14px}
footer code{overflow-wrap:anywhere}
.words code{white-space:nowrap}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.92em}
@media (max-width:700px){
main{padding:24px 16px 40px}
h1{font-size:25px}h2{font-size:18px;margin-top:44px}
dl.tiles{grid-template-columns:repeat(2,1fr)}
.tiles dd{font-size:22px}
.wide,.more{display:none}.narrow{display:block}
table{font-size:14px}
th,td{padding-left:8px}
}
@media print{h2{break-after:avoid}figure,table{break-inside:avoid}}
"""
)


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
        f"<style>\n{style_sheet(len(data['buckets']['buckets']))}{STYLE}</style>\n</head>\n"
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
        + _figure(data, "curve", "Padding efficiency by number of buckets, with the limit")
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
        + '<p class="note" style="margin:26px 0 0">The loader over the whole epoch, steps averaged in groups: '
        "level where no part of the epoch is short or long.</p>\n"
        + _figure(data, "epoch", "Tokens by bucket over the epoch of the loader")
        + _legend(data)
    )


def _shapes(data: Json) -> str:
    if len(data["shapes"]["choices"]) < 2:
        return ""
    return (
        "<h2>Tensor shapes</h2>\n"
        '<p class="note">A compiler or a graph capture pays once per shape. Rounding padded lengths up, or one '
        "shape per bucket, makes fewer. Bars of shapes are logarithmic.</p>\n"
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
