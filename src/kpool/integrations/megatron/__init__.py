"""The k-pool indexer inside megatron-core's sparse attention, by subclassing; nothing is patched.

    spec = kpool_dsa_module_spec(config, backend, kpool=kpool_config(config, args=args))

The spec is Megatron's own with two modules exchanged: `KPoolDSAttention` for `DSAttention`, `KPoolDSAIndexer` for
`DSAIndexer`. Importing this package checks that the installed megatron-core has every hook it relies on.

    capability   which hooks, and what is missing
    settings     TransformerConfig, flags and environment -> KPoolConfig
    rows         which query rows a rank holds, where they are, what they may see
    indexer      KPoolDSAIndexer: projections, gathers, selection
    attention    KPoolDSAttention: hands the selection to DSAttention's own sparse attention
    spec         the two modules in a ModuleSpec
    local        a backend without Transformer Engine, for CPUs
"""

from kpool.config import add_kpool_args
from kpool.integrations.megatron.capability import require_hooks

require_hooks()

from kpool.integrations.megatron.attention import KPoolDSAttention  # noqa: E402
from kpool.integrations.megatron.indexer import KPoolDSAIndexer  # noqa: E402
from kpool.integrations.megatron.local import KPoolLocalSpecProvider  # noqa: E402
from kpool.integrations.megatron.settings import kpool_config  # noqa: E402
from kpool.integrations.megatron.spec import kpool_dsa_module_spec, with_kpool  # noqa: E402

__all__ = [
    "KPoolDSAIndexer",
    "KPoolDSAttention",
    "KPoolLocalSpecProvider",
    "add_kpool_args",
    "kpool_config",
    "kpool_dsa_module_spec",
    "with_kpool",
]
