"""Figures of a report as SVG files in light and dark, for a README or slides.

shardgen report tests/data/drafter_histogram.npz --accumulate 4 --out report.html
python scripts/pictures.py report.html .github/assets --figures lengths,curve,strategies,frontier,composition
"""

import argparse
import json
import re
from pathlib import Path

from shardgen.report_canvas import WIDE
from shardgen.report_figures import FIGURES, draw
from shardgen.report_style import THEMES, standalone_svg

LABELS = {
    "lengths": "Histogram of sample lengths with bucket boundaries",
    "curve": "Padding efficiency by number of buckets, with the limit",
    "strategies": "Padding efficiency, rank balance, overall, recurrence and step divergence by strategy",
    "frontier": "Overall efficiency and recurrence by lookahead and number of buckets",
    "composition": "Tokens of single steps by bucket, under every strategy",
    "epoch": "Tokens by bucket over the epoch of the loader",
    "shapes": "Distinct tensor shapes and padding efficiency by rounding",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path, help="page that shardgen report has written")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--figures", default=",".join(FIGURES), help="names, comma-separated")
    arguments = parser.parse_args()
    page = arguments.report.read_text(encoding="utf-8")
    found = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', page)
    data = {name: json.loads(text) for name, text in found}
    if not data:
        parser.error(f"{arguments.report} is not a report: it holds no values")
    names = arguments.figures.split(",")
    if unknown := [name for name in names if name not in FIGURES]:
        parser.error(f"{unknown[0]!r} is not one of {', '.join(FIGURES)}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    num_buckets = len(data["buckets"]["buckets"])
    for name in names:
        for theme in THEMES:
            svg = standalone_svg(draw(name, data, WIDE), name, LABELS[name], theme, num_buckets)
            path = arguments.folder / f"{name}-{theme}.svg"
            path.write_text(svg + "\n", encoding="utf-8")
            print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
