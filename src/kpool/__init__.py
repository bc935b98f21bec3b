"""kpool: exact, memory-bounded k-pool token selection for GLM-5.3-Flash sparse attention, sharded over query rows.

Names and rooms are loaded on first use: importing this package does not import torch, so that the command line can
still tell torch how its threads should wait.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kpool.attention import KPoolSparseAttention as KPoolSparseAttention
    from kpool.cache import IndexerCache as IndexerCache
    from kpool.captures import capture as capture
    from kpool.config import KPoolConfig as KPoolConfig
    from kpool.indexer import KPoolIndexer as KPoolIndexer
    from kpool.ops import fused_qk_topk_kpool as fused_qk_topk_kpool
    from kpool.ops import select_pools as select_pools
    from kpool.pooling import PooledKeys as PooledKeys
    from kpool.pooling import pool_keys as pool_keys
    from kpool.sharding import ShardPlan as ShardPlan
    from kpool.visibility import Visibility as Visibility

__version__ = "0.1.0"

_HOME = {
    "IndexerCache": "cache",
    "KPoolConfig": "config",
    "KPoolIndexer": "indexer",
    "KPoolSparseAttention": "attention",
    "PooledKeys": "pooling",
    "ShardPlan": "sharding",
    "Visibility": "visibility",
    "capture": "captures",
    "fused_qk_topk_kpool": "ops",
    "pool_keys": "pooling",
    "select_pools": "ops",
}

__all__ = sorted([*_HOME, "__version__"])


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is not None:
        value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")  # a room: `import kpool; kpool.reference`
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
