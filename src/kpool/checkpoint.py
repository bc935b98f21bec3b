"""Read one indexer out of a safetensors checkpoint directory, and nothing else of it.

A directory holds one or many `*.safetensors` files, `config.json`, and maybe `model.safetensors.index.json`, which
says which file holds which tensor. Without the index, the names in the headers of the files say it.
"""

from __future__ import annotations

import json
import re
from os import PathLike
from pathlib import Path

from torch import Tensor

from kpool.config import KPoolConfig

__all__ = ["read_config", "read_indexer"]

_INDEXER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:\w+\.)*indexer\.(.+)$")


def read_config(path: str | PathLike[str]) -> KPoolConfig:
    """The configuration of a checkpoint directory.

    Raises:
        FileNotFoundError: no `config.json`.
        ValueError: the file is not JSON or not that of a k-pool model.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; pass config= to read the tensors without it")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not JSON ({error})") from error
    return KPoolConfig.from_hf(content)


def read_indexer(path: str | PathLike[str], layer: int) -> dict[str, Tensor]:
    """The indexer tensors of `layer`, by parameter name (`wq_b.weight`, ...).

    Args:
        path: checkpoint directory.
        layer: layer number.

    Raises:
        FileNotFoundError: no directory, no safetensors file in it, or a file that the index names is missing.
        ValueError: no indexer in that layer; the message lists the layers that have one.
        ModuleNotFoundError: the package safetensors is not installed.
    """
    from safetensors import safe_open

    folder = Path(path)
    places = _places(folder)
    found: dict[str, tuple[str, Path]] = {}
    layers: set[int] = set()
    for key, file in places.items():
        if match := _INDEXER.search(key):
            layers.add(int(match[1]))
            if int(match[1]) == layer:
                found[match[2]] = (key, file)
    if not found:
        known = ", ".join(map(str, sorted(layers))) or "none"
        raise ValueError(f"{folder}: layer {layer} has no indexer; layers that have one: {known}")
    tensors = {}
    for file in sorted({file for _, file in found.values()}):
        if not file.is_file():
            raise FileNotFoundError(f"{file}: the index names this file, but it is not there")
        with safe_open(str(file), framework="pt") as opened:
            for name, (key, home) in found.items():
                if home == file:
                    tensors[name] = opened.get_tensor(key)
    return tensors


def _places(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor of the checkpoint."""
    from safetensors import safe_open

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such directory")
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if indexes:
        weight_map = json.loads(indexes[0].read_text(encoding="utf-8")).get("weight_map", {})
        return {key: folder / name for key, name in weight_map.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: no *.safetensors file in this directory")
    places = {}
    for file in files:
        with safe_open(str(file), framework="pt") as opened:
            places.update(dict.fromkeys(opened.keys(), file))
    return places
