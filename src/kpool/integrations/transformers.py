"""`use_kpool(model)`: a `glm5_next` model of transformers with kpool's selection, and back.

    with use_kpool(model):
        model.generate(...)

Each indexer of the model is replaced by one that shares its parameters, so the state dict, devices, dtypes and whatever
wraps the projections stay as they are; no function is patched. The numbers are those of `numerics="hf"`: selections
equal the original's wherever two scores are not within rounding of each other, and ties go to the lowest pool.

The model's own cache keeps the raw states, as before, so everything transformers does to a cache (beam reordering,
cropping, resetting) works. Pooled keys are kept beside it and extended with the new tokens, and rebuilt from the raw
states when the cache was changed by anything else than the last call.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kpool.cache import IndexerCache
from kpool.config import KPoolConfig
from kpool.indexer import KPoolIndexer
from kpool.visibility import Visibility

__all__ = ["KPoolTransformersIndexer", "UsesKPool", "use_kpool"]


def use_kpool(model: nn.Module, *, order: str = "position", impl: str = "auto") -> UsesKPool:
    """Give every indexer of a `glm5_next` model kpool's selection.

    Args:
        model: any module that contains `Glm5NextTextIndexer`s; changed in place.
        order: order of the selected pools; attention does not depend on it, and "position" is the cheaper.
        impl: as in `kpool.fused_qk_topk_kpool`.

    Returns:
        A handle: `.restore()` puts the original indexers back, and so does leaving it as a context manager.

    Raises:
        ModuleNotFoundError: transformers is not installed or has no `glm5_next`.
        ValueError: the model has no such indexer, or uses kpool already.
    """
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

    owners = [m for m in model.modules() if isinstance(getattr(m, "indexer", None), nn.Module)]
    if any(isinstance(m.indexer, KPoolTransformersIndexer) for m in owners):
        raise ValueError(f"model: this {type(model).__name__} uses kpool already; restore() the handle first")
    found = [(m, m.indexer) for m in owners if isinstance(m.indexer, Glm5NextTextIndexer)]
    if not found:
        raise ValueError(
            f"model: expected a glm5_next model with Glm5NextTextIndexer modules, "
            f"got {type(model).__name__} without any"
        )
    replacements = [KPoolTransformersIndexer(old, order=order, impl=impl) for _, old in found]
    for (owner, _), new in zip(found, replacements, strict=True):
        owner.indexer = new
    return UsesKPool(found)


class UsesKPool:
    """What `use_kpool` changed, and the way back. Usable as a context manager."""

    def __init__(self, originals: list[tuple[Any, nn.Module]]) -> None:
        self._originals = originals

    def restore(self) -> None:
        """Put the original indexers back; doing it twice is no error."""
        for owner, indexer in self._originals:
            owner.indexer = indexer
        self._originals = []

    def __enter__(self) -> UsesKPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


class KPoolTransformersIndexer(KPoolIndexer):
    """Stands in for a `Glm5NextTextIndexer`: the same parameters, call and result shape.

    Args:
        original: the indexer whose parameters are shared.
        order, impl: as in `KPoolIndexer`.
    """

    def __init__(self, original: Any, *, order: str = "position", impl: str = "auto") -> None:
        with torch.device("meta"):  # the parameters are replaced at once
            super().__init__(KPoolConfig.from_hf(original.config), "hf", order=order, impl=impl, row_tile=None)
        self.layer_idx: int = original.layer_idx
        for name in ("wq_b", "wk", "k_norm", "weights_proj", "index_kpool_compress_ape", "index_kpool_compress_gate"):
            setattr(self, name, getattr(original, name))
        self.train(original.training)
        self._kept: weakref.WeakKeyDictionary[Any, tuple[IndexerCache, weakref.ref[Tensor]]]
        self._kept = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, q_resid: Tensor, attention_mask: Tensor, cache: Any = None, **_: Any
    ) -> Tensor:
        """Select tokens, as `Glm5NextTextIndexer.forward` does.

        Args:
            hidden_states: `[B, S, hidden]`; q_resid: `[B, S, q_lora_rank]`.
            attention_mask: bool `[B, S]` over the new tokens.
            cache: the model's cache (already updated with this call's keys and values) or None.

        Returns:
            int32 `[B, S, W]` key slots, -1 unused.

        Raises:
            ValueError: (on CPU) a mask with a hole between valid tokens.
        """
        # the modules are called, not their weights: adapters and quantised layers live there
        q = self.wq_b(q_resid).unflatten(-1, (self.config.index_n_heads, self.config.index_head_dim))
        k = self.k_norm(self.wk(hidden_states))
        gate = F.linear(hidden_states, self.index_kpool_compress_gate)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        states = torch.cat([k, gate, attention_mask.to(k.dtype)[..., None]], dim=-1)

        kept = IndexerCache()
        if cache is None:
            pooled = self._append(kept, states)
        else:
            kept, pooled = self._with_cache(states, cache)
        return self.select(
            q.transpose(0, 1),
            weights.transpose(0, 1) * self.config.index_n_heads**-0.5,
            pooled,
            Visibility.left_padded(kept.valid(), queries=q.shape[1]),
            tokens=kept.length,
        )

    def _with_cache(self, states: Tensor, cache: Any) -> tuple[IndexerCache, Any]:
        """Store the raw states as the original does; extend the pooled keys, or rebuild them after a foreign change."""
        layer = cache.layers[self.layer_idx]
        before = layer.indexer_keys
        everything = cache.update_indexer(states, self.layer_idx)
        length = int(layer.get_seq_length())
        known = self._kept.get(layer)
        if known is not None and known[1]() is before and known[0].length + states.shape[1] == length:
            kept = known[0]
            pooled = self._append(kept, states)
        else:
            kept = IndexerCache()
            pooled = self._append(kept, everything[:, :length])
        self._kept[layer] = (kept, weakref.ref(everything))
        return kept, pooled

    def _append(self, kept: IndexerCache, states: Tensor) -> Any:
        dim = self.config.index_head_dim
        k, gate, valid = torch.split(states.transpose(0, 1), [dim, dim, 1], dim=-1)
        return kept.append(
            k,
            gate,
            self.index_kpool_compress_ape,
            valid[..., 0].transpose(0, 1).bool(),
            pool_size=self.config.index_kpool,
            numerics="hf",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KPoolTransformersIndexer:
        """Copy without the pooled keys, which belong to the caches of this module."""
        import copy

        new = type(self).__new__(type(self))
        memo[id(self)] = new
        for name, value in vars(self).items():
            new.__dict__[name] = weakref.WeakKeyDictionary() if name == "_kept" else copy.deepcopy(value, memo)
        return new
