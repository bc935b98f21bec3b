"""kpool: exact, memory-bounded k-pool token selection for GLM-5.3-Flash sparse attention, sharded over query rows."""

from kpool.attention import KPoolSparseAttention
from kpool.cache import IndexerCache
from kpool.captures import capture
from kpool.config import KPoolConfig
from kpool.indexer import KPoolIndexer
from kpool.ops import fused_qk_topk_kpool, select_pools
from kpool.pooling import PooledKeys, pool_keys
from kpool.sharding import ShardPlan
from kpool.visibility import Visibility

__version__ = "0.1.0"

__all__ = [
    "IndexerCache",
    "KPoolConfig",
    "KPoolIndexer",
    "KPoolSparseAttention",
    "PooledKeys",
    "ShardPlan",
    "Visibility",
    "__version__",
    "capture",
    "fused_qk_topk_kpool",
    "pool_keys",
    "select_pools",
]
