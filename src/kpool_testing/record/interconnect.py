"""The alpha-beta model: a message of n bytes takes alpha + n / bandwidth seconds.

Collectives are rings and trees of messages. An estimate says which of two designs moves less and how often, not what
a cluster will show: it knows no congestion, no overlap and no protocol switch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interconnect:
    """A link as one rank sees it: `latency` in seconds per message, `bandwidth` in bytes per second, one direction."""

    name: str
    latency: float
    bandwidth: float


# Nominal one-direction bandwidth per GPU or port; latencies are round figures for a small message.
INTERCONNECTS: dict[str, Interconnect] = {
    link.name: link
    for link in (
        Interconnect("nvlink3", 3e-6, 300e9),
        Interconnect("nvlink4", 3e-6, 450e9),
        Interconnect("nvlink5", 3e-6, 900e9),
        Interconnect("pcie4-x16", 6e-6, 31.5e9),
        Interconnect("pcie5-x16", 6e-6, 63e9),
        Interconnect("infiniband-hdr", 5e-6, 25e9),
        Interconnect("infiniband-ndr", 5e-6, 50e9),
        Interconnect("ethernet-10g", 30e-6, 1.25e9),
        Interconnect("ethernet-100g", 20e-6, 12.5e9),
    )
}


def seconds(kind: str, sent: int, size: int, link: Interconnect) -> float:
    """Time of one collective on one rank.

    Args:
        kind: canonical name of the collective.
        sent: bytes the rank hands in.
        size: ranks in the group.
        link: the interconnect.

    Ring all-gather of `sent` bytes each: (size - 1) steps of `sent`. All-reduce: reduce-scatter and all-gather of
    sent / size. Example: 8 ranks, 1 MB each, 1 GB/s, 10 us: all-gather takes 7 * (10 us + 1 ms) = 7.07 ms.
    """
    if size <= 1:
        return 0.0
    steps, share = size - 1, sent / size
    depth = math.ceil(math.log2(size))
    if kind.startswith("all_gather") or kind in ("gather", "gather_object"):
        return steps * (link.latency + sent / link.bandwidth)
    if kind.startswith("all_reduce"):
        return 2 * steps * (link.latency + share / link.bandwidth)
    if kind.startswith(("reduce_scatter", "all_to_all", "scatter")):
        return steps * (link.latency + share / link.bandwidth)
    if kind.startswith("barrier"):
        return depth * link.latency
    if kind.startswith(("broadcast", "reduce")):
        return depth * (link.latency + sent / link.bandwidth)
    return link.latency + sent / link.bandwidth
