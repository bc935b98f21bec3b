"""`kpool info`: versions, devices, and which implementation `impl="auto"` picks here, and why."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

import torch
from rich.table import Table

from kpool.cli import view
from kpool.cli.exits import OK
from kpool.cli.workload import add_geometry
from kpool.dispatch import CHUNK_VARIABLE, chunk_bytes, why_not_triton

_PACKAGES = ("kpool", "torch", "triton", "transformers", "megatron-core", "safetensors", "numpy")


def add_parser(commands: Any) -> None:
    """Declare `kpool info`."""
    parser = commands.add_parser("info", help="versions, devices, which implementation would run and why")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="dtype of q and k"
    )
    add_geometry(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the facts."""
    facts = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "threads": torch.get_num_threads(),
        "memory": memory(),
        "devices": [device_facts(device, args) for device in devices()],
    }
    if args.json:
        view.print_json(facts)
        return OK
    table = Table("what", "value", title="kpool info", title_justify="left")
    table.add_row("python", f"{facts['python']} on {facts['platform']}")
    for name, version in versions().items():
        table.add_row(name, version or "not installed")
    table.add_row("threads", str(facts["threads"]))
    table.add_row("memory", view.size(memory()))
    view.OUT.print(table)
    picks = Table("device", "name", "impl", "why", "score buffer", title="impl='auto' here", title_justify="left")
    for device in devices():
        fact = device_facts(device, args)
        picks.add_row(fact["device"], fact["name"], fact["impl"], fact["why"], view.size(fact["score_chunk_bytes"]))
    view.OUT.print(picks)
    return OK


def versions() -> dict[str, str | None]:
    """Installed versions of what kpool runs on or beside; None where absent."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def memory() -> int:
    """Bytes of main memory."""
    import psutil

    return int(psutil.virtual_memory().total)


def devices() -> list[torch.device]:
    """The CPU and every CUDA device."""
    return [torch.device("cpu")] + [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def device_facts(device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Name, chosen implementation, reason and score buffer of one device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    dtype = getattr(torch, args.dtype)
    reason = why_not_triton(device, dtype, args.heads, args.dim, args.pool, args.topk // args.pool)
    where = f"{CHUNK_VARIABLE} is set" if CHUNK_VARIABLE in os.environ else "default"
    return {
        "device": str(device),
        "name": name,
        "impl": "torch" if reason else "triton",
        "why": reason or "a GPU, triton is installed, and the kernels serve this geometry",
        "score_chunk_bytes": chunk_bytes(None, device),
        "score_chunk_from": where,
    }
