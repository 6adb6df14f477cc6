"""Colours of a report in light and dark, and how figures drawn once follow either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

THEMES: dict[str, dict[str, str]] = {
    "light": {
        "page": "#ffffff",
        "panel": "#f5f7fa",
        "ink": "#1c2430",
        "muted": "#586474",
        "line": "#dde3ea",
        "accent": "#0a66c2",
        "plain": "#a4b0be",
        "warm": "#b4530f",
    },
    "dark": {
        "page": "#11151b",
        "panel": "#1a2028",
        "ink": "#e7ebf0",
        "muted": "#9ba8b7",
        "line": "#2c3541",
        "accent": "#5fb0ff",
        "plain": "#566474",
        "warm": "#f09a5b",
    },
}
# From the shortest bucket to the longest.
RAMPS = {
    "light": ("#97d8c4", "#45a5c9", "#3b62bd", "#46257c"),
    "dark": ("#24655f", "#3c93bd", "#8fa4f4", "#f1d3fb"),
}
# What matplotlib is given; in the page these become variables. No figure uses such a colour otherwise.
INK, MUTED, LINE, ACCENT, PLAIN, WARM, PAGE = (f"#fe00{i:02x}" for i in range(7))
_NAMES = dict(
    zip(
        (INK, MUTED, LINE, ACCENT, PLAIN, WARM, PAGE),
        ("ink", "muted", "line", "accent", "plain", "warm", "page"),
        strict=True,
    )
)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_RULES = (
    "*{box-sizing:border-box}\n"
    f"body{{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 {FONT};"
    "-webkit-text-size-adjust:100%}\n"
    """main{max-width:908px;margin:0 auto;padding:40px 24px 56px}
h1{font-size:30px;line-height:1.2;letter-spacing:-.01em;margin:0 0 6px;overflow-wrap:anywhere}
h2{font-size:20px;line-height:1.3;margin:52px 0 4px}
p{margin:0 0 16px;max-width:70ch}
.sub,.note,footer{color:var(--muted)}
.note{font-size:15px}
.after{margin:26px 0 0}
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
# Drawn with a font that comes with matplotlib; the page says which one is shown.
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.color": INK,
    "text.parse_math": False,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlepad": 8,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": LINE,
    "grid.linewidth": 1,
    "xtick.color": LINE,
    "xtick.labelcolor": MUTED,
    "xtick.major.size": 4,
    "xtick.minor.size": 0,
    "ytick.color": LINE,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.labelsize": 12,
    "ytick.labelsize": 12,
    "legend.frameon": False,
    "lines.linewidth": 2,
    "lines.markersize": 6,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


def bucket_color(bucket: int) -> str:
    """The colour to draw a bucket with; at most 256 of them differ."""
    return f"#fd00{bucket % 256:02x}"


def ramp(theme: str, num_colors: int) -> list[str]:
    """Colours from short to long, as ``#rrggbb``."""
    stops = [tuple(int(color[i : i + 2], 16) for i in (1, 3, 5)) for color in RAMPS[theme]]
    colors = []
    for number in range(num_colors):
        at = (len(stops) - 1) * (number / (num_colors - 1) if num_colors > 1 else 0.5)
        low = min(int(at), len(stops) - 2)
        mixed = (a + (b - a) * (at - low) for a, b in zip(stops[low], stops[low + 1], strict=True))
        colors.append("#" + "".join(f"{round(value):02x}" for value in mixed))
    return colors


def variables(theme: str, num_buckets: int) -> dict[str, str]:
    """Names and colours of a theme: ``ink``, ... and ``b0``, ``b1``, ..."""
    buckets = {f"b{k}": color for k, color in enumerate(ramp(theme, num_buckets))}
    return {**THEMES[theme], **buckets}


def style_sheet(num_buckets: int) -> str:
    """The page's style: themes as CSS variables, dark where the reader prefers it, and the rules."""

    def block(theme: str) -> str:
        return "".join(f"--{name}:{color};" for name, color in variables(theme, num_buckets).items())

    return (
        f":root{{color-scheme:light dark;{block('light')}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{block('dark')}}}}}\n{_RULES}"
    )


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """A figure for the page: colours as variables, sized by the page, ids that no other figure has."""
    return _svg(figure, name, label, {hex_: f"var(--{variable})" for hex_, variable in _NAMES.items()}, None)


def standalone_svg(figure: Figure, name: str, label: str, theme: str, num_buckets: int) -> str:
    """A figure as a file of its own, in one theme, on its background."""
    colors = variables(theme, num_buckets)
    return _svg(figure, name, label, {hex_: colors[variable] for hex_, variable in _NAMES.items()}, colors)


def _shorter(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def _svg(
    figure: Figure, name: str, label: str, names: Mapping[str, str], theme: Mapping[str, str] | None
) -> str:
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context():
        matplotlib.rcParams.update(RC)  # ticks are made, and styled, while drawing
        matplotlib.rcParams["svg.hashsalt"] = name
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The style would reach beyond the figure; these are the defaults that lines need.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    # Groups of one path, and a thousandth of a pixel, are of no use.
    svg = re.sub(r'<g id="patch_\d+">\s*(<path\b[^>]*/>)\s*</g>', r"\1", svg)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"\d+\.\d{3,}", _shorter, tag[0]), svg)
    svg = re.sub(r"\n\s*", " ", svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", FONT, svg)
    svg = re.sub(r"#fe00[0-9a-f]{2}", lambda found: names.get(found[0], found[0]), svg)
    svg = re.sub(
        r"#fd00([0-9a-f]{2})",
        lambda found: f"var(--b{int(found[1], 16)})" if theme is None else theme[f"b{int(found[1], 16)}"],
        svg,
    )
    width, height = (round(72 * inches) for inches in figure.get_size_inches())
    size = "" if theme is None else f' width="{width}" height="{height}"'
    background = "" if theme is None else f'<rect width="100%" height="100%" fill="{theme["page"]}"/>'
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"{size} '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}" '
        f'style="stroke-linejoin:round;stroke-linecap:butt">{background}'
    )
    return re.sub(r"<svg\b[^>]*>", lambda found: opening, svg, count=1)
