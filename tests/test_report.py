"""Reports: values are the commands' own, figures draw these values, a browser shows the page whole."""

import html
import json
import re
from dataclasses import fields
from itertools import combinations, pairwise

import numpy as np
import pytest
from browser import measure
from corpora import function_lengths
from hypothesis import given
from hypothesis import strategies as st

from loader.plan import EpochOptions, PlanOptions
from loader.simulate import corpus_of_lengths, simulate
from shardgen.cli import run
from shardgen.report import render, write_report
from shardgen.report_canvas import NARROW, WIDE
from shardgen.report_data import length_bars
from shardgen.report_figures import FIGURES, draw, spread
from shardgen.report_style import RAMPS, THEMES, ramp, standalone_svg
from shardgen.report_words import article, conclusions, ordinal, points, share

OPTIONS = [
    "--token-budget",
    "16384",
    "--world-size",
    "2",
    "--accumulate",
    "3",
    "--seed",
    "5",
    "--lookahead",
    "4",
]
"""Two widths of the page: a desk and a phone."""
WIDTHS = (1280, 420)


def last_json(capsys, *arguments):
    code = run([*map(str, arguments), "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out.splitlines()[-1])


def page_data(page):
    found = re.findall(r'<script type="application/json" id="data-(\w+)">(.*?)</script>', page, re.DOTALL)
    return {name: json.loads(text) for name, text in found}


@pytest.fixture(scope="module")
def lengths_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "function lengths <&>.npy"
    np.save(path, np.minimum(function_lengths()[:2500], 6000))
    return path


@pytest.fixture(scope="module")
def page(lengths_file):
    out = lengths_file.parent / "report.html"
    assert run(["report", str(lengths_file), "--out", str(out), *OPTIONS]) == 0
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def data(page):
    return page_data(page)


@pytest.fixture(scope="module")
def laid_out(page, tmp_path_factory):
    """scheme -> what the browser measured at each of WIDTHS."""
    folder = tmp_path_factory.mktemp("browser")
    return {scheme: measure(page, folder, WIDTHS, scheme) for scheme in THEMES}


# ---------------------------------------------------------------- values


def test_values_in_the_browser_are_those_of_simulate_and_optimize(laid_out, lengths_file, data, capsys):
    shown = laid_out["light"][0]["data"]
    assert {name.removeprefix("data-"): values for name, values in shown.items()} == data
    simulated = last_json(capsys, "simulate", lengths_file, *OPTIONS, "--frontier")
    for strategies in (simulated["strategies"], shown["data-strategies"]):
        for figures in strategies.values():
            assert figures.pop("plan_seconds") >= 0
    assert shown["data-strategies"] == simulated["strategies"]
    assert shown["data-frontier"]["points"] == simulated["frontier"]
    assert shown["data-lengths"]["boundaries"] == simulated["boundaries"]
    optimized = last_json(capsys, "optimize", lengths_file, *OPTIONS)
    assert shown["data-buckets"]["buckets"] == optimized["buckets"]
    names = ("curve", "alternatives", "lower_bound_efficiency", "padding_efficiency", "boundaries")
    for name in (*names, "lookahead_padding_efficiency"):
        assert shown["data-curve"][name] == optimized[name]
    for name in ("world_size", "accumulate", "num_samples", "token_budget", "lookahead", "boundaries"):
        assert shown["data-setting"][name] == simulated[name]


def test_shapes_are_those_of_simulate(lengths_file, data, capsys):
    names = ("num_shapes", "padding_efficiency", "rank_balance", "overall")
    choices = data["shapes"]["choices"]
    calls = {
        "as set": [],
        "multiples of 8": ["--pad-to-multiple-of", "8"],
        "multiples of 32": ["--pad-to-multiple-of", "32"],
        "multiples of 128": ["--pad-to-multiple-of", "128"],
    }
    assert [choice["name"] for choice in choices] == [*calls, "one per bucket"]
    boundaries = ",".join(map(str, data["setting"]["boundaries"]))
    for choice, arguments in zip(choices, calls.values(), strict=False):
        same = last_json(
            capsys, "simulate", lengths_file, *OPTIONS, "--boundaries", boundaries, "--strategies", "loader",
            *arguments,
        )["strategies"]["loader"]  # fmt: skip
        assert {name: choice[name] for name in names} == {name: same[name] for name in names}
    # Static shapes come with the boundaries that are best for them, on the same stored samples.
    best = last_json(capsys, "optimize", lengths_file, *OPTIONS, "--padding", "boundary")["boundaries"]
    setting = data["setting"]
    known = {field.name for field in fields(PlanOptions)}
    options = PlanOptions.from_json(
        {**{k: v for k, v in setting.items() if k in known}, "boundaries": best, "padding": "boundary"}
    )
    stored = corpus_of_lengths(np.load(lengths_file), setting["boundaries"])
    static = simulate(stored, options, EpochOptions(seed=setting["seed"]), "loader").to_json()
    assert {name: choices[-1][name] for name in names} == {name: static[name] for name in names}
    assert choices[-1]["num_shapes"] <= len(data["buckets"]["buckets"])


def test_steps_hold_each_bucket_once_in_sum(data):
    composition = data["composition"]
    for name, steps in composition["steps"].items():
        shares = np.array(steps["shares"])
        assert shares.shape[1] == composition["num_buckets"]
        np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-4)
        assert steps["first_step"] + len(shares) <= data["strategies"][name]["num_steps"]
    epoch = composition["epoch"]
    assert epoch["num_steps"] == data["strategies"]["loader"]["num_steps"]
    sizes = np.diff([*epoch["first_step"], epoch["num_steps"]])
    assert (sizes > 0).all()
    # Steps are of like size, so the mean over steps is the corpus's share, but for the few of the tail.
    tokens = np.array([bucket["num_tokens"] for bucket in data["buckets"]["buckets"]])
    mean = sizes @ np.array(epoch["shares"]) / sizes.sum()
    np.testing.assert_allclose(mean, tokens / tokens.sum(), atol=0.03)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60),
    bounds=st.sets(st.integers(1, 6000), max_size=6),
)
def test_bars_count_every_sample_once_and_cross_no_boundary(lengths, bounds):
    lengths = np.array(lengths)
    longest = int(lengths.max())
    boundaries = [0, *sorted(b for b in bounds if b < longest), longest]
    bars = length_bars(lengths, boundaries)
    edges = bars["edges"]
    assert all(a < b for a, b in pairwise(edges))
    assert edges[0] == lengths.min() - 1 and edges[-1] == longest
    for low, high, count, bucket in zip(
        edges[:-1], edges[1:], bars["num_samples"], bars["bucket"], strict=True
    ):
        assert count == ((lengths > low) & (lengths <= high)).sum()
        assert boundaries[bucket] < high <= boundaries[bucket + 1]
        assert low >= boundaries[bucket] or low == lengths.min() - 1


def test_a_build_is_reported_with_its_own_boundaries(corpus, tmp_path, capsys):
    built = last_json(
        capsys, "build", corpus, "--out", tmp_path / "out", "--token-budget", "2048", "--max-length", "1024",
        "--over-length", "truncate", "--buckets", "3",
    )  # fmt: skip
    out = tmp_path / "report.html"
    code = run(["report", str(tmp_path / "out"), "--out", str(out), "--no-frontier", "--world-size", "2"])
    assert code == 0, capsys.readouterr().err
    data = page_data(out.read_text(encoding="utf-8"))
    assert data["setting"]["boundaries"] == built["boundaries"]
    assert data["setting"]["token_budget"] == 2048
    assert [b["num_samples"] for b in data["buckets"]["buckets"]] == [
        b["num_samples"] for b in built["buckets"]
    ]
    simulated = last_json(capsys, "simulate", tmp_path / "out", "--world-size", "2")["strategies"]
    for strategies in (simulated, data["strategies"]):
        for figures in strategies.values():
            del figures["plan_seconds"]
    assert data["strategies"] == simulated
    assert data["frontier"]["points"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layout", "packed"],
        ["--padding", "boundary"],
        ["--buckets", "1", "--world-size", "1"],
        ["--boundaries", "100,200,300,9000"],
        ["--buckets", "20"],
    ],
)
def test_every_kind_of_plan_has_a_report(lengths_file, tmp_path, arguments):
    out = tmp_path / "report.html"
    command = ["report", str(lengths_file), "--out", str(out), "--no-frontier", "--token-budget", "16384"]
    assert run([*command, *arguments]) == 0
    data = page_data(out.read_text(encoding="utf-8"))
    assert data["strategies"]["loader"]["dropped"] == 0
    assert len(conclusions(data)) >= 5


# ---------------------------------------------------------------- figures


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_figures_draw_their_values(data, width):
    curve = draw("curve", data, width).axes[0]
    line = next(line for line in curve.lines if len(line.get_xdata()) == len(data["curve"]["curve"]))
    assert [tuple(point) for point in line.get_xydata()] == [
        (point["num_buckets"], point["padding_efficiency"]) for point in data["curve"]["curve"]
    ]
    figure = draw("strategies", data, width)
    measures = ("padding_efficiency", "rank_balance", "overall", "recurrence", "step_divergence")
    for ax, name in zip(figure.axes, measures, strict=True):
        assert [bar.get_width() for bar in ax.containers[-1]] == [
            strategy[name] for strategy in data["strategies"].values()
        ]
    overall, recurrence = draw("frontier", data, width).axes
    for ax, name in ((overall, "overall"), (recurrence, "recurrence")):
        drawn = [y for line in ax.lines for y in line.get_ydata()]
        assert drawn == [point[name] for point in data["frontier"]["points"]]
    lengths = draw("lengths", data, width).axes[0]
    bars, edges = data["lengths"]["num_samples"], np.array(data["lengths"]["edges"])
    logarithmic = data["lengths"]["logarithmic"]
    widths = np.diff(np.log(edges + 1) if logarithmic else edges)
    heights = np.concatenate([patch.get_data().values for patch in lengths.patches])
    np.testing.assert_allclose(heights * widths / (heights * widths).sum(), np.array(bars) / sum(bars))
    for ax, (name, steps) in zip(
        draw("composition", data, width).axes, data["composition"]["steps"].items(), strict=True
    ):
        assert ax.get_title(loc="left") == name
        total = sum(bar.get_height() for bars in ax.containers for bar in bars)
        assert total == pytest.approx(np.sum(steps["shares"]))


def test_a_figure_of_its_own_has_the_colours_of_its_theme(data):
    for theme in THEMES:
        svg = standalone_svg(draw("strategies", data, WIDE), "strategies", "Strategies", theme, 6)
        assert THEMES[theme]["accent"] in svg and THEMES[theme]["page"] in svg
        assert "var(" not in svg and "#fe00" not in svg and "#fd00" not in svg


@given(st.lists(st.floats(0, 10), min_size=1, max_size=8))
def test_labels_are_spread_apart_below_the_top(heights):
    placed = spread([(y, str(i)) for i, y in enumerate(heights)], 1.0, 10.0)
    assert sorted(text for _, text in placed) == sorted(map(str, range(len(heights))))
    assert all(b - a >= 1 - 1e-9 for (a, _), (b, _) in pairwise(placed))
    assert placed[-1][0] <= 10


# ---------------------------------------------------------------- words


def test_conclusions_say_what_the_values_say(data):
    text = " ".join(conclusions(data))
    loader, full = data["strategies"]["loader"], data["strategies"]["full-shuffle"]
    assert f"The loader spends {loader['overall']:.1%} of the ranks' time on real tokens" in text
    assert f"a full shuffle needs {loader['overall'] / full['overall']:.2f} times" in text
    curve = {point["num_buckets"]: point["padding_efficiency"] for point in data["curve"]["curve"]}
    assert f"A 7th bucket buys {100 * (curve[7] - curve[6]):.1f} points without lookahead" in text
    last = data["buckets"]["buckets"][-1]
    assert f"The longest bucket ({last['lower'] + 1:,} to {last['upper']:,} tokens) holds" in text
    assert "Every sample is delivered exactly once per epoch" in text


def test_numbers_are_read_as_people_read_them():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)] == [
        "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "101st", "111th",
    ]  # fmt: skip
    assert [article(n) for n in (2, 7, 8, 11, 16, 18, 80)] == ["a", "a", "an", "an", "a", "an", "an"]
    assert (points(0.011), points(0.0101), points(0.2)) == ("1.1 points", "1.0 point", "20.0 points")
    assert (share(0.99996), share(1.0), share(0.9951)) == ("99.99%", "100.0%", "99.5%")


# ---------------------------------------------------------------- the page


def test_the_page_needs_nothing_else(page):
    addresses = {
        address for address in re.findall(r"https?://[^\s\"'<)]+", page) if "www.w3.org" not in address
    }
    assert addresses == set()
    assert not re.search(r"<(?:link|img|iframe)\b|@import|@font-face|url\((?!#)", page)
    assert re.findall(r"<script(?! type=\"application/json\")", page) == []
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert references <= set(ids)
    assert {f"data-{source}" for source, _ in FIGURES.values()} <= set(ids)
    assert len(page.encode()) < 2_000_000


def test_the_title_is_escaped(page):
    assert "<title>Length report: function lengths &lt;&amp;&gt;.npy</title>" in page
    assert "shardgen report &#x27;function lengths &lt;&amp;&gt;.npy&#x27; --token-budget 16384" in page


def test_nothing_is_fetched(laid_out):
    assert [m["fetched"] for measured in laid_out.values() for m in measured] == [[]] * 4


def check_layout(measured, wanted):
    """Nothing leaves its page or figure, and no text of a figure lies on another."""
    assert measured["width"] == wanted
    assert measured["scrollWidth"] <= measured["clientWidth"]
    assert measured["outside"] == []
    assert measured["wrapped"] == []
    for name, drawings in measured["figures"].items():
        assert len(drawings) == 1, f"{name}: one drawing is shown at a width"
        (drawing,) = drawings
        left, top, right, bottom = drawing["box"]
        for text in drawing["texts"]:
            a, b, c, d = text["box"]
            inside = a >= left - 1 and b >= top - 1 and c <= right + 1 and d <= bottom + 1
            assert inside, f"{name} at {wanted}: {text} leaves {drawing['box']}"
        assert drawing["size"] >= 9, f"{name} at {wanted} is too small to read"
        for one, two in combinations(drawing["texts"], 2):
            (a, b, c, d), (e, f, g, h) = one["box"], two["box"]
            # Boxes have some air above and below the letters.
            wide, high = min(c, g) - max(a, e), min(d, h) - max(b, f)
            assert wide <= 1 or high <= 4, f"{name} at {wanted}: {one['text']!r} on {two['text']!r}"


@pytest.mark.parametrize("scheme", THEMES)
def test_nothing_overflows_or_overlaps(laid_out, scheme):
    for wanted, measured in zip(WIDTHS, laid_out[scheme], strict=True):
        assert set(measured["figures"]) == set(FIGURES)
        check_layout(measured, wanted)


@pytest.mark.parametrize(
    ("lengths", "arguments"),
    [
        (np.full(100, 50), ["--token-budget", "512"]),  # one length
        (np.arange(1, 20), ["--token-budget", "40", "--world-size", "2"]),  # fewer samples than batches
        (np.arange(1, 3000) % 999 + 1, ["--buckets", "40", "--no-frontier"]),
    ],
    ids=["one-length", "tiny", "many-buckets"],
)
def test_extremes_lie_as_well(lengths, arguments, tmp_path):
    np.save(tmp_path / "lengths.npy", lengths)
    out = tmp_path / "report.html"
    assert run(["report", str(tmp_path / "lengths.npy"), "--out", str(out), *arguments]) == 0
    for wanted, measured in zip(
        WIDTHS, measure(out.read_text(encoding="utf-8"), tmp_path, WIDTHS, "light"), strict=True
    ):
        check_layout(measured, wanted)


def test_texts_of_figures_are_their_values(laid_out, data):
    for measured in laid_out["light"]:
        texts = [text["text"] for text in measured["figures"]["strategies"][0]["texts"]]
        for name, figures in data["strategies"].items():
            assert name in texts
            for key in ("padding_efficiency", "rank_balance", "overall"):
                assert f"{figures[key]:.1%}" in texts
            assert {f"{figures['recurrence']:.4f}", f"{figures['step_divergence']:.3f}"} <= set(texts)
        texts = [text["text"] for text in measured["figures"]["shapes"][0]["texts"]]
        for choice in data["shapes"]["choices"]:
            assert {choice["name"], f"{choice['num_shapes']:,}"} <= set(texts)


def test_light_and_dark_follow_the_reader(laid_out):
    for scheme, measured in laid_out.items():
        for at_width in measured:
            for name, shown in (("page", at_width["background"]), ("ink", at_width["ink"])):
                rgb = tuple(int(THEMES[scheme][name][i : i + 2], 16) for i in (1, 3, 5))
                assert shown == f"rgb({rgb[0]}, {rgb[1]}, {rgb[2]})"


def luminance(color):
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", THEMES)
def test_text_stands_out(theme):
    colors = THEMES[theme]
    for name in ("ink", "muted", "accent", "warm"):
        for ground in ("page", "panel"):
            assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    assert contrast(colors["plain"], colors["page"]) >= 2
    ends = ramp(theme, 6)
    assert (ends[0], ends[-1]) == (RAMPS[theme][0], RAMPS[theme][-1])
    assert len(set(ends)) == 6 and all(contrast(color, colors["page"]) > 1.3 for color in ends)


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--out", "{folder}"], 1, "is a directory: name a file"),
        (["--out", "{folder}/none/report.html"], 1, "there is no directory"),
        ([], 2, "Missing option '--out'"),
        (["--out", "{folder}/r.html", "--token-budget", "100"], 1, "token_budget 100"),
    ],
)
def test_wrong_calls_leave_nothing(lengths_file, tmp_path, capsys, arguments, code, message):
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    assert run(["report", str(lengths_file), *arguments]) == code
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_an_older_page_is_replaced_at_once(tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    out.write_text("older")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            write_report(out, "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"] and out.read_text() == "older"
    write_report(out, "newer \N{EM DASH} page")
    assert out.read_text(encoding="utf-8") == "newer \N{EM DASH} page"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    other = tmp_path / "other"
    other.touch()
    assert out.stat().st_mode == other.stat().st_mode  # as any new file of this user


def test_the_page_depends_on_its_values_alone(page, data, lengths_file):
    command = re.search(r"<footer>.*?<code>(.*?)</code>", page)[1]
    assert render(data, lengths_file.name, html.unescape(command)) == page
