"""The scenarios: each is one call, sharded one way.

The seed list (`SEED`) is the causal mask and the packed batch at the sizes where sharding breaks first: ragged last
shards, empty shards, shard edges inside the chunk loop. `MORE` walks the other layouts, options and larger shapes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from tests.support.calls import LAYOUTS, Call, exact_call, random_call

SMALL_BUDGET = 1  # bytes: one tile of rows at a time


@dataclass(frozen=True)
class Scenario:
    """A call, and how its rows are dealt.

    Attributes:
        name: unique.
        kind, seed, arguments: which builder makes the call, and with what.
        size, plan: ranks of the group, shard plan.
        options: keywords of the call that must not change its result.
    """

    name: str
    kind: str
    size: int
    plan: str = "contiguous"
    seed: int = 0
    arguments: tuple[tuple[str, Any], ...] = ()
    options: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def exact(self) -> bool:
        """Whether the unsharded call equals the reference bit for bit."""
        return self.kind != "random"

    def call(self) -> Call:
        """The call, on the CPU."""
        return _built(self.kind, self.seed, self.arguments)


@cache
def _built(kind: str, seed: int, arguments: tuple[tuple[str, Any], ...]) -> Call:
    given = dict(arguments)
    if kind == "random":
        return random_call(seed, **given)
    if kind == "causal mask":
        rows = given["rows"]
        call = exact_call(seed, "nothing", **given)
        hidden = torch.ones(rows, rows, dtype=torch.bool).triu(1)
        return replace(call, visibility={"mask": torch.zeros(rows, rows).masked_fill(hidden, -torch.inf)})
    if kind == "packed documents":
        call = exact_call(seed, "nothing", rows=40, **given)
        return replace(call, visibility={"cu_seqlens_kv": torch.tensor([0, 3, 3, 20, 21, 37], dtype=torch.int32)})
    return exact_call(seed, kind, **given)


def _seed() -> list[Scenario]:
    made = []
    budgets = (("whole", {}), ("chunked", {"score_chunk_bytes": SMALL_BUDGET}))
    for size, rows, batch, (chunk, options) in itertools.product((2, 3, 8), (5, 24, 37), (1, 2), budgets):
        name = f"causal-mask-{rows}rows-batch{batch}-{chunk}-{size}ranks"
        made.append(
            Scenario(name, "causal mask", size, "contiguous", rows, (("rows", rows), ("batch", batch)), options)
        )
    for size, (chunk, options) in itertools.product((2, 4), budgets):
        made.append(Scenario(f"packed-{chunk}-{size}ranks", "packed documents", size, "contiguous", 1, (), options))
    return made


def _more() -> list[Scenario]:
    made = []
    for layout, size in itertools.product(LAYOUTS, (3, 4)):
        options = {"score_chunk_bytes": SMALL_BUDGET}
        shape = (("rows", 45), ("tokens", 45), ("batch", 2))
        made.append(Scenario(f"exact-{layout}-{size}ranks", layout, size, seed=3, arguments=shape, options=options))
    for number in range(8):
        made.append(Scenario(f"random-{number}-{2 + number % 3}ranks", "random", 2 + number % 3, seed=100 + number))
    wide = (("rows", 200), ("tokens", 1100), ("batch", 1), ("budget", 8))
    for layout in ("causal", "window", "packed_bounds"):
        options = {"score_chunk_bytes": 200_000}
        made.append(Scenario(f"wide-{layout}-3ranks", layout, 3, seed=5, arguments=wide, options=options))
    for name, options in {
        "position-order": {"order": "position"},
        "hf": {"numerics": "hf"},
        "rotated": {"rotate_activation_enabled": True},
        "fp8": {"fp8_indexer": True},
        "identity": {"use_relu": False},
        "no-tail": {"always_select_tail": False},
        "width-64": {"width_multiple": 64},
    }.items():
        arguments = (("rows", 70), ("pool_size", 4), *options.items())
        made.append(Scenario(f"{name}-3ranks", "causal", 3, seed=7, arguments=arguments))
    checked = {"check_replicated": True}
    made.append(Scenario("inputs-checked-3ranks", "window", 3, seed=8, arguments=(("rows", 20),), options=checked))
    for name, rows, tokens in (("no-rows", 0, 9), ("one-row", 1, 9), ("no-pool", 9, 3), ("no-keys", 4, 0)):
        shape = (("rows", rows), ("tokens", tokens), ("pool_size", 4), ("batch", 2))
        made.append(Scenario(f"{name}-4ranks", "window", 4, seed=9, arguments=shape))
    return made


def _dealt_in_blocks(one: Scenario) -> bool:
    """Which scenarios run under the other plan too: every shape and layout, chunked, batches of two."""
    chunked_seeds = ("batch2-chunked", "packed-chunked")
    return one.name.startswith(("exact", "wide", "position")) or any(name in one.name for name in chunked_seeds)


SEED = _seed()
MORE = _more()
SCENARIOS = [
    *SEED,
    *MORE,
    *(replace(one, name=f"{one.name}-blocks", plan="block_cyclic") for one in SEED + MORE if _dealt_in_blocks(one)),
]
