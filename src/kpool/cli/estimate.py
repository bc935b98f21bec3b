"""How long a selection takes, sharded and not: arithmetic on a card's rates and the alpha-beta model of a link.

    score    2 * H * D operations per scored pool, at the rate a score kernel reaches on the card
    select   passes over the fp32 scores of those pools
    gather   the ring all-gather of int32 pool ids [B, R, M]
    reorder  block_cyclic alone: one copy of the gathered ids
    same     what every rank does, sharded or not: pooling the keys, expanding ids to tokens [B, S, K + P - 1]

The slowest rank counts. Rates are ranges, so times are too. Left out: launch gaps, overlap, congestion, and that short
inputs do not fill a GPU. Example, H200: 524,288 causal tokens are 2.8e14 operations, so 0.49 s to 0.59 s to score.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

from kpool_testing.record.interconnect import Interconnect, seconds

LONGEST = 1 << 21  # tokens; a plan that does not pay up to here is said never to
_PRECISION = 32  # rows; break-even lengths are found to this


@dataclass(frozen=True)
class Card:
    """Rates of one accelerator; every one an assumption to replace by a measurement (`--score-tflops`).

    Attributes:
        name: for people.
        score: operations per second of scoring, `(slow, fast)`.
        cache, memory: bytes per second of the second-level cache and of the main memory.
    """

    name: str
    score: tuple[float, float]
    cache: float
    memory: float


# H200: 61 % to 72 % of the 790 TF/s that a plain bf16 matrix product was measured to reach. B200: assumed.
CARDS = {
    "h200": Card("H200", (480e12, 570e12), 5.5e12, 4.8e12),
    "b200": Card("B200", (700e12, 1000e12), 10e12, 6.8e12),
}


@dataclass(frozen=True)
class Geometry:
    """The sizes of one call: `S` = `T` tokens, `B` batch, `H` heads, `D` dim, `P` pool size, `K` selected tokens."""

    tokens: int
    batch: int
    heads: int
    dim: int
    pool: int
    topk: int


@dataclass(frozen=True)
class Step:
    """Seconds of each part of one selection on its slowest rank; see the module for what the parts are."""

    score: float
    select: float
    gather: float
    reorder: float
    same: float

    @property
    def total(self) -> float:
        """All parts, one after the other."""
        return self.score + self.select + self.gather + self.reorder + self.same


PARTS = tuple(part.name for part in fields(Step))


def step(scored: int, call: Geometry, card: Card, *, fast: bool) -> Step:
    """One unsharded selection that scores `scored` pools; `fast` picks the end of the card's range."""
    rate = card.score[1] if fast else card.score[0]
    per_byte = 2 / card.cache if fast else 5 / card.memory  # scores stay in the cache, or a radix select rereads them
    pooled = (4 + 2 / call.pool) * call.batch * call.tokens * call.dim  # bytes: k and gate in bf16, pooled keys
    expanded = 4 * call.batch * call.tokens * (call.topk + call.pool - 1 + call.topk // call.pool)
    return Step(
        score=2.0 * call.heads * call.dim * scored / rate,
        select=4.0 * scored * per_byte,
        gather=0.0,
        reorder=0.0,
        same=(pooled + expanded) / card.memory,
    )


def sharded_step(
    busiest: int, sent: int, kind: str, ranks: int, call: Geometry, card: Card, link: Interconnect, *, fast: bool
) -> Step:
    """The same shared out under the plan `kind`: `busiest` pools on the slowest rank, `sent` bytes from each rank."""
    alone = step(busiest, call, card, fast=fast)
    if ranks == 1:
        return alone
    copied = 2 * sent * ranks if kind == "block_cyclic" else 0
    gather = seconds("all_gather_single", sent, ranks, link)
    return Step(alone.score, alone.select, gather, copied / card.memory, alone.same)


def break_even(pays: Callable[[int], bool]) -> int | None:
    """The shortest length from which `pays(tokens)` holds, to 32 tokens; None if it does not up to `LONGEST`.

    `pays` must be false up to some length and true from there on.
    """
    high = _PRECISION
    while not pays(high):
        if high >= LONGEST:
            return None
        high *= 2
    low = high // 2 if high > _PRECISION else 0
    while high - low > _PRECISION:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def span(low: float, high: float) -> str:
    """A range of seconds for people: `71-96 ms`, or one figure where both read the same."""
    unit, scale = next((u, s) for u, s in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if high * s >= 1 or u == "µs")
    texts = list(dict.fromkeys(_three(value * scale) for value in (low, high)))
    return f"{'-'.join(texts)} {unit}"


def _three(value: float) -> str:
    """At least two significant digits, no exponent."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 1 - math.floor(math.log10(value)))}f}"
