"""From Megatron's configuration to a `KPoolConfig`.

megatron-core 0.19 has no field for k-pool options, and its config refuses unknown ones, so they travel in the
`ModuleSpec`. A version or fork that has `dsa_indexer_kpool*` attributes on its config is read too. The first that says
anything wins: explicit > flag (namespace) > attribute of the config > environment > default.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from kpool.config import KPoolConfig

# Megatron's name of each size, and ours
_SIZES = {
    "hidden_size": "hidden_size",
    "q_lora_rank": "q_lora_rank",
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}
_OPTIONS = {
    "dsa_indexer_kpool": "index_kpool",
    "dsa_indexer_kpool_always_select_tail": "index_kpool_always_select_tail",
    "dsa_indexer_kpool_shard_queries_across_tp": "dsa_indexer_kpool_shard_queries_across_tp",
    "dsa_indexer_kpool_check_replicated": "check_replicated",
}


def kpool_config(
    config: Any,
    *,
    args: argparse.Namespace | None = None,
    environ: Mapping[str, str] | None = None,
    **explicit: Any,
) -> KPoolConfig:
    """The `KPoolConfig` of a Megatron model.

    Args:
        config: a TransformerConfig; gives the sizes (`hidden_size`, `q_lora_rank`, `dsa_indexer_n_heads`,
            `dsa_indexer_head_dim`, `dsa_indexer_topk`) and, where it has them, the `dsa_indexer_kpool*` options.
        args: parsed flags, see `add_kpool_args`.
        environ: mapping to read instead of `os.environ`.
        **explicit: fields of `KPoolConfig` that win over everything else.

    Returns:
        A configuration whose sharding switch is resolved to True or False.

    Raises:
        ValueError: a size that Megatron's config leaves out, or a value `KPoolConfig` refuses.
    """
    fields: dict[str, Any] = {**_sizes(config), **_options(config)}
    base = KPoolConfig(**fields)
    return KPoolConfig.from_args(args or argparse.Namespace(), base, environ=environ, **explicit)


def resolve(config: Any, kpool: KPoolConfig | None) -> KPoolConfig:
    """`kpool` with what it leaves open taken from `config` and the environment; `kpool_config(config)` for None.

    Raises:
        TypeError: `kpool` is no KPoolConfig.
        ValueError: `kpool` and `config` disagree about a size, or an option of the config is unknown.
    """
    if kpool is None:
        return kpool_config(config)
    if not isinstance(kpool, KPoolConfig):
        raise TypeError(f"kpool: expected a KPoolConfig or None, got {type(kpool).__name__}")
    for theirs, ours in _SIZES.items():
        expected, got = _sizes(config)[ours], getattr(kpool, ours)
        if expected != got:
            raise ValueError(f"kpool.{ours}: expected {expected} as {theirs} of the model's config, got {got}")
    flag = _options(config).get("dsa_indexer_kpool_shard_queries_across_tp")
    if kpool.dsa_indexer_kpool_shard_queries_across_tp is None and flag is not None:
        kpool = kpool.replace(dsa_indexer_kpool_shard_queries_across_tp=flag)
    return KPoolConfig.from_env(kpool)


def _sizes(config: Any) -> dict[str, int]:
    sizes = {ours: getattr(config, theirs) for theirs, ours in _SIZES.items()}
    if sizes["q_lora_rank"] is None:
        sizes["q_lora_rank"] = sizes["hidden_size"]  # as Megatron: queries then come from the hidden states
    for theirs, ours in _SIZES.items():
        if sizes[ours] is None:
            raise ValueError(f"{theirs}: expected a size in the model's config, got None")
    return sizes


def _options(config: Any) -> dict[str, Any]:
    said = {ours: getattr(config, theirs, None) for theirs, ours in _OPTIONS.items()}
    return {name: value for name, value in said.items() if value is not None}
