"""One indexer call on disk: save the inputs of a real run, replay them anywhere.

    with kpool.capture(model.layers[3].self_attn.indexer, "call.safetensors"):
        model(input_ids)                        # the module's next call is saved, its result is unchanged

    kpool verify --input call.safetensors --ranks 8

`CapturedCall` is the file in memory: the tensors and options of one `kpool.fused_qk_topk_kpool` call, under the names
of its arguments. A framework that calls the function itself saves them with `CapturedCall(...).save(path)`.
`docs/capture-format.md` describes the file. Files need the package `safetensors` (extra `cli` or `hf`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORMAT = "kpool-call"
VERSION = "1"

_REQUIRED = ("q", "k", "weights")
_OPTIONAL = (
    "gate_score", "ape", "mask", "varlen_starts", "varlen_ends", "key_positions", "cu_seqlens_kv",
)  # fmt: skip
_DIMS = {"q": "[S, B, H, D]", "k": "[T, B, D]", "weights": "[S, B, H]"}
_SWITCHES = ("use_relu", "always_select_tail", "fp8_indexer", "rotate_activation_enabled")


@dataclass(frozen=True, eq=False)
class CapturedCall:
    """The arguments of one `fused_qk_topk_kpool` call, under the names they have there.

    Attributes:
        q: `[S, B, H, D]`; k: `[T, B, D]`; weights: `[S, B, H]`.
        index_topk, pool_size: `K` and `P`.
        gate_score: `[T, B, D]`; ape: `[P, D]`; both may be None.
        mask, varlen_starts, varlen_ends, key_positions, cu_seqlens_kv: what the rows may see, as in that function.
        numerics: "megatron" or "hf", what the numbers were computed for.
        use_relu, always_select_tail, fp8_indexer, rotate_activation_enabled: switches of that function.
        notes: free text by name: model, layer, step.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    index_topk: int
    pool_size: int
    gate_score: Tensor | None = None
    ape: Tensor | None = None
    mask: Tensor | None = None
    varlen_starts: Tensor | None = None
    varlen_ends: Tensor | None = None
    key_positions: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    numerics: str = "megatron"
    use_relu: bool = True
    always_select_tail: bool = True
    fp8_indexer: bool = False
    rotate_activation_enabled: bool = False
    notes: dict[str, str] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Every argument by name, ready for `fused_qk_topk_kpool(**call.arguments(), ...)`."""
        return {name: value for name, value in vars(self).items() if name != "notes"}

    def to(self, device: torch.device | str) -> CapturedCall:
        """The same call with every tensor on `device`."""
        moved: dict[str, Any] = {n: v.to(device) for n, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)

    def save(self, path: str | Path) -> Path:
        """Write the call as a safetensors file and return its path.

        Raises:
            ValueError: a note whose name is one of the format's own.
            ModuleNotFoundError: safetensors is not installed.
        """
        from safetensors.torch import save_file

        tensors = {n: v.detach().cpu().contiguous() for n, v in vars(self).items() if isinstance(v, Tensor)}
        options = {"index_topk": str(self.index_topk), "pool_size": str(self.pool_size)}
        options |= {"numerics": self.numerics}
        options |= {name: "true" if getattr(self, name) else "false" for name in _SWITCHES}
        taken = sorted({"format", "version", *options} & set(self.notes))
        if taken:
            raise ValueError(f"notes: expected names other than the format's own, got {', '.join(taken)}")
        head = {"format": FORMAT, "version": VERSION, **options, **self.notes}
        save_file(tensors, str(path), metadata=head)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> CapturedCall:
        """Read a call from a safetensors file.

        Raises:
            ValueError: the file cannot be read, is no captured call, or lacks something; the message says which.
        """
        tensors, head = read_safetensors(path)
        if head.get("format") != FORMAT or head.get("version") != VERSION:
            raise ValueError(
                f"{path}: expected metadata format={FORMAT!r} version={VERSION!r}, "
                f"got format={head.get('format')!r} version={head.get('version')!r}"
            )
        missing = [f"tensor {name} {_DIMS[name]}" for name in _REQUIRED if name not in tensors]
        missing += [f"metadata {name}" for name in ("index_topk", "pool_size") if name not in head]
        unknown = sorted(set(tensors) - set(_REQUIRED) - set(_OPTIONAL))
        if missing:
            beside = f"; unknown tensors {', '.join(unknown)}" if unknown else ""
            raise ValueError(f"{path}: incomplete, missing {', '.join(missing)}{beside}")
        if unknown:
            raise ValueError(f"{path}: unknown tensors {', '.join(unknown)}; known: {', '.join(_REQUIRED + _OPTIONAL)}")
        options: dict[str, Any] = {**tensors}
        options |= {name: _whole(path, head, name) for name in ("index_topk", "pool_size")}
        options |= {name: _switch(path, head, name) for name in _SWITCHES if name in head}
        if "numerics" in head:
            options["numerics"] = head["numerics"]
        known = {"format", "version", *options}
        return cls(**options, notes={n: v for n, v in head.items() if n not in known})


def read_safetensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """All tensors and the metadata of a safetensors file.

    Raises:
        ValueError: no such file, or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a readable safetensors file ({error})") from error


def _whole(path: str | Path, head: dict[str, str], name: str) -> int:
    try:
        return int(head[name])
    except ValueError:
        raise ValueError(f"{path}: metadata {name}: expected a whole number, got {head[name]!r}") from None


def _switch(path: str | Path, head: dict[str, str], name: str) -> bool:
    if head[name] not in ("true", "false"):
        raise ValueError(f"{path}: metadata {name}: expected 'true' or 'false', got {head[name]!r}")
    return head[name] == "true"


@contextmanager
def capture(module: nn.Module, path: str | Path, **notes: str) -> Iterator[Path]:
    """Save the inputs of the next call of an indexer module, inside a `with` block.

    Args:
        module: anything with the checkpoint's parameter names (`wq_b`, `wk`, `k_norm`, `weights_proj`,
            `index_kpool_compress_ape`, `index_kpool_compress_gate`) called as `(hidden_states [B, S, hidden],
            q_resid [B, S, q_lora], attention_mask, cache)`: transformers' `Glm5NextTextIndexer`, `KPoolIndexer`.
        path: the safetensors file to write.
        **notes: free text kept in the file.

    The call must be a prefill (no cached tokens before it) without padding, so that its keys are its own. Only the
    first call in the block is saved; the module's results are not touched.

    Raises:
        TypeError: the module lacks a parameter. ValueError: the folder of `path` is not there, the call has padding, or
            tokens before it.
        RuntimeError: the block ended and the module was never called.
    """
    needed = ("wq_b", "wk", "k_norm", "weights_proj", "index_kpool_compress_ape", "index_kpool_compress_gate")
    lacking = [name for name in needed if not hasattr(module, name)]
    if lacking:
        raise TypeError(
            f"module: expected an indexer with {', '.join(needed)}, got {type(module).__name__} without {lacking}"
        )
    if not Path(path).parent.is_dir():  # now, not after an hour of the run that is to be captured
        raise ValueError(f"path: expected a file in a folder that exists, got {path}")
    saved: list[Path] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not saved:
            names = ("hidden_states", "q_resid", "attention_mask", "cache")
            saved.append(call_of(module, notes, **(dict(zip(names, args, strict=False)) | kwargs)).save(path))

    handle = module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield Path(path)
    finally:
        handle.remove()
    if not saved:
        raise RuntimeError(f"{type(module).__name__} was not called inside the block, nothing was saved to {path}")


@torch.no_grad()
def call_of(
    module: nn.Module,
    notes: dict[str, str],
    hidden_states: Tensor,
    q_resid: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> CapturedCall:
    """The call an indexer module is about to make, from its inputs and its parameters."""
    m: Any = module
    if getattr(m, "batch_first", True):
        hidden_states, q_resid = hidden_states.transpose(0, 1), q_resid.transpose(0, 1)
    rows = hidden_states.shape[0]
    if attention_mask is not None and not bool(attention_mask.bool().all()):
        raise ValueError("attention_mask: expected no padding, got padded tokens; capture a batch of equal lengths")
    if cache is not None and (before := _tokens_before(cache, m, rows)):
        raise ValueError(f"cache: expected a prefill, got {before} cached tokens before the call")
    numerics = getattr(m, "numerics", "hf")  # transformers' own module has no such attribute, and is "hf"
    q, weights, k, gate = _project(m, hidden_states, q_resid)
    ends = torch.arange(1, rows + 1, dtype=torch.int32, device=q.device)
    seen: dict[str, Any] = {"varlen_starts": torch.zeros_like(ends), "varlen_ends": ends}
    if cu_seqlens is not None:
        seen = {"cu_seqlens_kv": cu_seqlens}
    return CapturedCall(
        q=q,
        k=k,
        weights=weights,
        gate_score=gate,
        ape=m.index_kpool_compress_ape,
        **seen,
        index_topk=m.config.index_topk,
        pool_size=m.config.index_kpool,
        numerics=numerics,
        always_select_tail=m.config.index_kpool_always_select_tail,
        notes=dict(notes),
    )


def _project(m: Any, hidden_states: Tensor, q_resid: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q `[S, B, H, D]`, weights `[S, B, H]`, k and gate `[T, B, D]`, as the module makes them of `[S, B, ...]`."""
    if hasattr(m, "project_queries"):
        return (*m.project_queries(hidden_states, q_resid), *m.project_keys(hidden_states))
    heads, dim = m.config.index_n_heads, m.config.index_head_dim
    weights = m.weights_proj(hidden_states.to(m.weights_proj.weight.dtype)).float() * heads**-0.5
    k, gate = m.k_norm(m.wk(hidden_states)), F.linear(hidden_states, m.index_kpool_compress_gate)
    return m.wq_b(q_resid).unflatten(-1, (heads, dim)), weights, k, gate


def _tokens_before(cache: Any, module: Any, rows: int) -> int:
    """Tokens the cache held before this call.

    A transformers cache already counts this call's tokens when the indexer runs: attention updates it first.
    """
    if hasattr(cache, "layers"):
        return max(0, int(cache.layers[module.layer_idx].get_seq_length()) - rows)
    length = getattr(cache, "length", None)
    return int(length) if length is not None else 0
