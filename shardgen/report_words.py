"""What the figures of a report mean, in sentences."""

from __future__ import annotations

from math import floor
from typing import Any

Json = dict[str, Any]

OFTEN = 0.05  # a recurrence worth a word
CHEAP = 0.01  # padding efficiency


def share(value: float) -> str:
    """A share in percent; what is not the whole is never rounded to it."""
    return f"{floor(value * 1e4) / 1e2:.2f}%" if 0.9995 <= value < 1 else f"{value:.1%}"


def points(difference: float) -> str:
    """A difference of shares in percentage points."""
    number = f"{100 * difference:.1f}"
    return f"{number} point" if number == "1.0" else f"{number} points"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..."""
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def article(number: int) -> str:
    """``a`` or ``an``, as a number is read."""
    return "an" if number in (11, 18) or str(number).startswith("8") else "a"


def conclusions(data: Json) -> list[str]:
    """Sentences for people, the most important first; every number stands in a figure or table."""
    sentences = [
        *_headline(data),
        *_strategies(data),
        *_next_bucket(data),
        *_longest_bucket(data),
        *_limit(data),
        *_rules(data),
        *_mix(data),
        *_recurrence(data),
        *_shapes(data),
        *_completeness(data),
    ]
    return [*sentences, *(f"{note[0].upper()}{note[1:]}." for note in data["setting"]["notes"])]


def _headline(data: Json) -> list[str]:
    loader = data["strategies"]["loader"]
    return [
        f"The loader spends {loader['overall']:.1%} of the ranks' time on real tokens: "
        f"{1 - loader['padding_efficiency']:.1%} of what a batch holds is padding, and ranks wait for "
        f"each other {1 - loader['rank_balance']:.1%} of the time."
    ]


def _strategies(data: Json) -> list[str]:
    strategies = data["strategies"]
    ours = strategies["loader"]
    # An epoch's real tokens are the same, so time goes with 1 / overall.
    times = {name: ours["overall"] / figures["overall"] for name, figures in strategies.items()}
    return [
        f"For the same epoch a full shuffle needs {times['full-shuffle']:.2f} times the loader's time and a "
        f"bucket shuffle {times['bucket-shuffle']:.2f} times, padding and waiting alone.",
        f"Sorted static batches need {times['sorted-static']:.2f} times, but bring the same samples together "
        f"in every epoch (recurrence {strategies['sorted-static']['recurrence']:.2f}; the loader "
        f"{ours['recurrence']:.4f}).",
    ]


def _next_bucket(data: Json) -> list[str]:
    curve = {point["num_buckets"]: point["padding_efficiency"] for point in data["curve"]["curve"]}
    now = data["curve"]["num_buckets"]
    if now not in curve or now + 1 not in curve:
        return []
    gain = curve[now + 1] - curve[now]
    text = f"{article(now + 1).capitalize()} {ordinal(now + 1)} bucket buys {points(gain)} without lookahead"
    ahead = data["frontier"]["lookahead"]
    here = {p["num_buckets"]: p for p in data["frontier"]["points"] if p["lookahead"] == ahead}
    more = sorted(count for count in here if count > now)
    if now in here and more:
        gained = here[more[0]]["padding_efficiency"] - here[now]["padding_efficiency"]
        text += f"; with lookahead {ahead}, going from {now} to {more[0]} buckets buys {points(gained)}"
    return [text + "."]


def _longest_bucket(data: Json) -> list[str]:
    buckets = [bucket for bucket in data["buckets"]["buckets"] if bucket["num_samples"]]
    if len(buckets) < 2:
        return []
    padding = [bucket["num_tokens"] * (1 / bucket["padding_efficiency"] - 1) for bucket in buckets]
    last, total = buckets[-1], max(sum(padding), 1e-9)
    num_tokens = sum(bucket["num_tokens"] for bucket in buckets)
    return [
        f"The longest bucket ({last['lower'] + 1:,} to {last['upper']:,} tokens) holds "
        f"{last['num_samples'] / data['buckets']['num_samples']:.1%} of the samples and "
        f"{last['num_tokens'] / num_tokens:.1%} of the tokens, and causes {padding[-1] / total:.1%} of the "
        f"padding without lookahead; its batches have as few as {last['batch_size']:,} "
        f"{'row' if last['batch_size'] == 1 else 'rows'}."
    ]


def _limit(data: Json) -> list[str]:
    limit = data["curve"]["lower_bound_efficiency"]
    loader = data["strategies"]["loader"]["padding_efficiency"]
    setting = data["setting"]
    if setting["layout"] == "packed":
        return [
            f"Batches are packed without padding: {loader:.1%} of the token budget is used by their tensors."
        ]
    shuffled = data["strategies"]["bucket-shuffle"]["padding_efficiency"]
    near = f"is {points(limit - loader)} below it" if limit - loader > 0.0005 else "reaches that too"
    return [
        f"Sorted packing, the limit without any shuffle, reaches {share(limit)}. The loader {near}; a plain "
        f"shuffle inside the same buckets is {points(max(limit - shuffled, 0.0))} below."
    ]


def _rules(data: Json) -> list[str]:
    curve = data["curve"]
    rules = {name: rule["padding_efficiency"] for name, rule in curve["alternatives"].items()}
    nearest = max(rules, key=lambda name: rules[name])
    farthest = min(rules, key=lambda name: rules[name])
    spelled = {
        "hand": "hand-picked",
        "quantile": "equal-count",
        "equal_token": "equal-token",
        "geometric": "geometric",
    }
    gain = curve["padding_efficiency"] - rules[nearest]
    worst = curve["padding_efficiency"] - rules[farthest]
    if max(abs(gain), abs(worst)) < 0.0005:
        return []
    if gain < 0:
        return [
            f"Without lookahead these boundaries pad {points(-gain)} more than {spelled[nearest]} ones would."
        ]
    return [
        f"Without lookahead these boundaries save {points(gain)} over the nearest rule ({spelled[nearest]}) "
        f"and {points(worst)} over {spelled[farthest]} ones."
    ]


def _mix(data: Json) -> list[str]:
    strategies, setting = data["strategies"], data["setting"]
    ours, full = strategies["loader"]["step_divergence"], strategies["full-shuffle"]["step_divergence"]
    batches = setting["world_size"] * setting["accumulate"]
    text = f"A step's mix of lengths is {ours:.3f} from the corpus's (full shuffle {full:.3f})"
    if ours <= full:
        return [text + ": every step is as good a sample of the lengths as a shuffled one."]
    return [
        text + f": its {batches} {'batch is' if batches == 1 else 'batches are'} each of one length. More "
        "batches in a step, by ranks or --accumulate, bring it down."
    ]


def _recurrence(data: Json) -> list[str]:
    often = data["strategies"]["loader"]["recurrence"]
    if often < OFTEN:
        return []
    ahead, count = data["setting"]["lookahead"], data["frontier"]["num_buckets"]
    text = (
        f"Of the pairs that share a batch {often:.1%} meet again in the next epoch: the set is small for "
        f"lookahead {ahead}"
    )
    fresher = [
        p
        for p in data["frontier"]["points"]
        if p["num_buckets"] == count and p["lookahead"] < ahead and p["recurrence"] < often / 2
    ]
    if fresher:
        best = max(fresher, key=lambda p: p["overall"])
        text += (
            f"; --lookahead {best['lookahead']} makes that {best['recurrence']:.1%}, "
            f"with {best['overall']:.1%} overall"
        )
    return [text + "."]


def _shapes(data: Json) -> list[str]:
    choices = data["shapes"]["choices"]
    fewer = [choice for choice in choices[1:] if choice["num_shapes"] < choices[0]["num_shapes"]]
    if not fewer:
        return []
    # The fewest shapes that cost under a point, else the cheapest way to fewer.
    efficiency = choices[0]["padding_efficiency"]
    cheap = [choice for choice in fewer if efficiency - choice["padding_efficiency"] < CHEAP]
    chosen = (
        min(cheap, key=lambda choice: choice["num_shapes"])
        if cheap
        else max(fewer, key=lambda choice: choice["padding_efficiency"])
    )
    cost = efficiency - chosen["padding_efficiency"]
    how = (
        "static shapes (--padding boundary)"
        if chosen["padding"] == "boundary"
        else f"--pad-to-multiple-of {chosen['pad_to_multiple_of']}"
    )
    return [
        f"An epoch has {choices[0]['num_shapes']:,} distinct tensor shapes; {how} makes that "
        f"{chosen['num_shapes']:,} and costs {points(max(cost, 0.0))} of padding efficiency."
    ]


def _completeness(data: Json) -> list[str]:
    loader = data["strategies"]["loader"]
    if loader["dropped"] or loader["repeated"]:
        return [f"{loader['dropped']:,} samples are dropped and {loader['repeated']:,} repeated."]
    tail = (
        f"; {loader['fillers']:,} filler{' keeps' if loader['fillers'] == 1 else 's keep'} ranks in step"
        if loader["fillers"]
        else ""
    )
    return [f"Every sample is delivered exactly once per epoch{tail}."]
