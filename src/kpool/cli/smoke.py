"""Smoke tests of an installed kpool: `pytest --pyargs kpool.cli.smoke`, from anywhere."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch

import kpool


def test_the_installed_version_is_the_imported_one() -> None:
    assert version("kpool") == kpool.__version__


def test_six_tokens_by_hand() -> None:
    """Two pools of two and room for one: row 5 takes the better pool, and always its tail."""
    keys = torch.tensor([1.0, 1.0, 3.0, 3.0, 2.0, 2.0])[:, None, None]
    ones = torch.ones(6, 1, 1)
    ends = torch.arange(1, 7, dtype=torch.int32)
    _, tokens = kpool.fused_qk_topk_kpool(
        ones[..., None], keys, ones, 2, 2, None, None, varlen_starts=torch.zeros_like(ends), varlen_ends=ends
    )
    expected = [[-1, -1, 0], [0, 1, -1], [0, 1, 2], [2, 3, -1], [2, 3, 4], [2, 3, -1]]
    assert tokens[0].tolist() == expected


def test_three_ranks_return_the_unsharded_selection() -> None:
    """The pytest plugin is not needed for this: `replay` is a function."""
    from kpool_testing import replay

    generator = torch.Generator().manual_seed(0)
    q = torch.randn(37, 2, 4, 16, generator=generator)
    k, weights = torch.randn(37, 2, 16, generator=generator), torch.randn(37, 2, 4, generator=generator)
    cu_seqlens = torch.tensor([0, 5, 5, 37])

    def select(group: Any = None) -> torch.Tensor:
        return kpool.fused_qk_topk_kpool(
            q,
            k,
            weights,
            8,
            4,
            None,
            None,
            cu_seqlens_kv=cu_seqlens,
            return_index_scores=False,
            query_shard_group=group,
        )[1]

    whole = select()
    assert all(torch.equal(result, whole) for result in replay(select, 3).results)
