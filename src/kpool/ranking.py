"""Scores with their error bounds: who wins, by how much, and which rows no rounding can change.

Shapes: ``r`` rows, ``N`` pools, ``M`` pool budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ranking:
    """Scores of some rows with what rounding may do to them.

    Attributes:
        score: float64 ``[r, N]``.
        error: float64 ``[r, N]``; an fp32 implementation's score lies within ``score +- error``.
        visible: bool ``[r, N]``.
    """

    score: Tensor
    error: Tensor
    visible: Tensor

    def order(self) -> list[list[int]]:
        """Visible pools of each row, best first: score descending, then id; NaN last."""
        order = []
        for score, visible in zip(self.score.tolist(), self.visible.tolist(), strict=True):

            def place(pool: int, score: list[float] = score) -> tuple[bool, float, int]:
                missing = math.isnan(score[pool])
                return missing, 0.0 if missing else -score[pool], pool

            order.append(sorted((pool for pool, seen in enumerate(visible) if seen), key=place))
        return order

    def best(self, budget: int) -> Tensor:
        """Winning pool ids of each row in score order, int64 ``[r, M]``, -1 padded."""
        out = self.score.new_full((self.score.shape[0], budget), -1, dtype=torch.int64)
        for row, ids in enumerate(self.order()):
            chosen = out.new_tensor(ids[:budget])
            out[row, : chosen.numel()] = chosen
        return out

    def margin(self, budget: int) -> Tensor:
        """Gap at the budget edge less the errors beside it, float64 ``[r]``; +inf for rows that see at most ``M``
        pools.

        Positive: the worst chosen pool beats the best rejected one whatever the rounding. Exact ties of scores with no
        error (ReLU zeros) are decided by the tie rule, and count as +inf too.
        """
        margin = self.score.new_full((self.score.shape[0],), math.inf, dtype=torch.float64)
        best = self.best(budget)
        for row in range(self.score.shape[0]):
            if int(self.visible[row].sum()) <= budget:
                continue
            chosen = torch.zeros_like(self.visible[row])
            chosen[best[row]] = True
            rejected = self.visible[row] & ~chosen
            low = (self.score[row] - self.error[row])[chosen]
            high = (self.score[row] + self.error[row])[rejected]
            gap = low.amin() - high.amax()
            exact = self.error[row][chosen][low.argmin()] == 0 and self.error[row][rejected][high.argmax()] == 0
            margin[row] = math.inf if gap == 0 and bool(exact) else gap
        return margin

    def decided(self, budget: int) -> Tensor:
        """Rows whose selected *set* no rounding within ``error`` can change, bool ``[r]``."""
        return self.margin(budget) > 0
