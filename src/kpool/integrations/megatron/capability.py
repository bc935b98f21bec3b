"""What this adapter relies on in megatron-core, checked by name instead of by version.

A hook is a class, function or method with the parameters that are used here. Besides, `DSAttention.forward` must have
the branch of layers that share another layer's selection: that is where the selection of kpool enters.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any

_VARIANT = "megatron.core.transformer.experimental_attention_variant"
_MODULES = {
    "dsa": f"{_VARIANT}.dsa",
    "dsa_layout": f"{_VARIANT}.dsa_layout",
    "dsa_masking": f"{_VARIANT}.dsa_masking",
    "module": "megatron.core.transformer.module",
    "spec_utils": "megatron.core.transformer.spec_utils",
}
_HOOKS: dict[str, tuple[str, ...]] = {
    "dsa.DSAIndexer": (),
    "dsa.DSAIndexerSubmodules": ("linear_wq_b", "linear_wk", "k_norm", "linear_weights_proj"),
    "dsa.DSAttention": ("config", "submodules", "layer_number", "cp_comm_type", "pg_collection"),
    "dsa.DSAttention.forward": (
        *("query", "key", "value", "attention_mask", "x", "qr"),
        *("position_ids", "attn_mask_type", "attention_bias", "packed_seq_params", "up_v_weight"),
    ),
    "dsa.DSAttention._get_index_share_topk_holder": ("packed_seq_params", "attention_mask"),
    "dsa.DSAttention._get_index_share_topk_length_holder": ("packed_seq_params", "attention_mask"),
    "dsa_layout.build_packed_allgather_cp_local_positions": ("cu_seqlens", "cp_size", "cp_rank", "output_size"),
    "dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder": (
        *("cu_seqlens_q", "cu_seqlens_kv", "cp_size", "cp_rank"),
        *("local_output_size", "key_local_output_size", "global_output_size"),
    ),
    "dsa_layout.build_zigzag_allgather_cp_key_reorder": ("sq", "cp_size"),
    "dsa_layout.build_zigzag_cp_local_positions": ("seq_len", "cp_size", "cp_rank"),
    "dsa_layout.extract_query_positions_from_position_ids": ("position_ids", "sq"),
    "dsa_layout.get_packed_qk_cu_seqlens": ("packed_seq_params",),
    "dsa_masking.generate_varlen_mask_params_for_positions": ("cu_seqlens", "query_positions"),
    "module.MegatronModule": ("config",),
    "spec_utils.build_module": (),
}
_BRANCH = ("skip_topk", "source_layer", "index_share", "_get_index_share_topk_holder")


def missing_hooks(modules: Mapping[str, Any] | None = None) -> list[str]:
    """What the adapter relies on and megatron-core does not have, one line each; empty if all is there.

    Args:
        modules: the modules to look at, by the last part of their name; None imports those of megatron-core.
    """
    found = _import() if modules is None else dict(modules)
    missing = [f"module {path}" for name, path in _MODULES.items() if name not in found]
    for hook, parameters in _HOOKS.items():
        home, *path = hook.split(".")
        if home not in found:
            continue
        value = found[home]
        for name in path:
            value = getattr(value, name, None)
        if value is None:
            missing.append(hook)
            continue
        lost = set(parameters) - set(inspect.signature(value).parameters) if parameters else set()
        missing += [f"{hook}({name})" for name in parameters if name in lost]
    forward = getattr(getattr(found.get("dsa"), "DSAttention", None), "forward", None)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    if forward is not None and not set(_BRANCH) <= set(names):
        missing.append("dsa.DSAttention.forward: the branch that reads another layer's selection")
    return missing


def require_hooks(modules: Mapping[str, Any] | None = None) -> None:
    """Raise ImportError, naming every missing hook and the version found; ModuleNotFoundError without megatron-core."""
    missing = missing_hooks(modules)
    if not missing:
        return
    version = _version()
    if version is None and len(missing) == len(_MODULES):
        raise ModuleNotFoundError(
            'kpool.integrations.megatron needs megatron-core: pip install "kpool[megatron]"', name="megatron"
        )
    raise ImportError(
        f"kpool.integrations.megatron: megatron-core {version or '(of unknown version)'} lacks {', '.join(missing)}; "
        "the adapter is tested with megatron-core 0.19.2"
    )


def _import() -> dict[str, Any]:
    """The modules megatron-core has."""
    found = {}
    for name, path in _MODULES.items():
        try:
            found[name] = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is not None and not error.name.startswith("megatron"):
                raise
    return found


def _version() -> str | None:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return None
