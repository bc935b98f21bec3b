"""`ModuleSpec`s of Megatron's attention with the k-pool indexer in it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from kpool.config import KPoolConfig
from kpool.integrations.megatron.attention import KPoolDSAttention
from kpool.integrations.megatron.indexer import KPoolDSAIndexer
from kpool.integrations.megatron.local import KPoolLocalSpecProvider


def kpool_dsa_module_spec(config: Any, backend: Any = None, *, kpool: KPoolConfig | None = None, **options: Any) -> Any:
    """The self-attention spec `get_dsa_module_spec_for_backend` makes, with the k-pool indexer.

    Args:
        config: an MLATransformerConfig.
        backend: a `BackendSpecProvider`; None is Transformer Engine's where that is installed, else
            `KPoolLocalSpecProvider`.
        kpool: k-pool options, as `kpool_config` makes them; None reads `config` and the environment when the module is
            built.
        **options: `order`, `impl`, `shard_plan`, `width_multiple` of `KPoolDSAIndexer`.
    """
    backend = _default_backend() if backend is None else backend
    spec = get_dsa_module_spec_for_backend(config=config, backend=backend)
    if isinstance(backend, KPoolLocalSpecProvider):
        # AbsorbedMLASelfAttention takes its two down projections from a list of classes; this one is always on it
        spec.submodules.linear_q_down_proj = spec.submodules.linear_kv_down_proj = ColumnParallelLinear
    return with_kpool(spec, kpool=kpool, **options)


def with_kpool(spec: Any, *, kpool: KPoolConfig | None = None, **options: Any) -> Any:
    """A copy of any spec (attention, layer, block) in which every DSAttention has the k-pool indexer.

    Args:
        spec: a `ModuleSpec`, a dataclass of submodules or a list of them; not changed.
        kpool, **options: as for `kpool_dsa_module_spec`.

    Raises:
        ValueError: there is no DSAttention in the spec.
    """
    spec = copy.deepcopy(spec)
    found = [core for core in _specs(spec) if core.module is DSAttention]
    if not found:
        raise ValueError(f"spec: expected a DSAttention in it, got none in {type(spec).__name__}")
    for core in found:
        core.module = KPoolDSAttention
        core.submodules.indexer.module = KPoolDSAIndexer
        core.submodules.indexer.params = {**(core.submodules.indexer.params or {}), "kpool": kpool, **options}
    return spec


def _specs(node: Any) -> Iterator[Any]:
    """Every `ModuleSpec` under `node`."""
    if isinstance(node, ModuleSpec):
        yield node
        yield from _specs(node.submodules)
    elif isinstance(node, functools.partial):  # newer parts of Megatron bind submodules to a class
        yield from _specs(list(node.keywords.values()))
    elif isinstance(node, (list, tuple)):
        for part in node:
            yield from _specs(part)
    elif hasattr(node, "__dataclass_fields__") and not isinstance(node, type):
        for part in vars(node).values():
            yield from _specs(part)


def _default_backend() -> Any:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        return KPoolLocalSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()
