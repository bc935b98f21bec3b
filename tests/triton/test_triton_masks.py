"""Explicit masks in the kernels: narrow pools are looked at token by token, wider ones one value a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kpool.triton import configs, launch, pieces
from tests.triton.cases import Case, build


@pytest.mark.interpret
@pytest.mark.parametrize("layout", ["mask", "mask_batched"])
@pytest.mark.parametrize("pool_size", [1, 3, configs.MAX_MASKED_POOL, configs.MAX_MASKED_POOL + 1, 16, 64])
def test_masks_over_pools_of_every_width(
    pool_size: int, layout: str, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hole hides its pool and no other; the mask is read down in pieces of one row here, and only where it must."""
    asked: list[int] = []

    def mask_of_pools(mask: Tensor, width: int, pools: int, read: Any = pieces._mask_of_pools) -> Tensor:
        asked.append(width)
        found: Tensor = read(mask, width, pools)
        assert found.shape == (*mask.shape[:2], pools)
        return found

    monkeypatch.setattr(pieces, "_MASK_PIECE", 1)
    monkeypatch.setattr(pieces, "_mask_of_pools", mask_of_pools)
    case = Case("masked", layout=layout, pool_size=pool_size, tokens=pool_size * 14 + 2, rows=5, batch=2, budget=3)
    built = build(case, gpu)
    assert built.mask is not None
    rng = torch.Generator().manual_seed(pool_size)
    holes = torch.rand(built.mask.shape, generator=rng) < 0.25 / pool_size
    holes[:, 0] = True
    built = replace(built, mask=torch.zeros(holes.shape).masked_fill(holes, -torch.inf).to(gpu))
    right = built.expected()
    assert (right >= 0).any() and (right[:, 0] == -1).all()  # row 0 sees nothing
    assert torch.equal(built.select(launch), right)
    assert asked == ([pool_size] if pool_size > configs.MAX_MASKED_POOL else [])
