"""Which calls the Triton path takes, and with which tiles: a static table, read without importing Triton.

Nothing is tuned at run time: a tile decides the layout of a sum, so two ranks with two tiles would differ in their last
bits. Beside each entry stand the registers and the shared memory its binary may use; ``python -m kpool.triton.inspect``
compiles every entry for every target and fails on a spill or on a figure above its budget.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import torch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
MAX_HEADS = 64
MAX_DIM = 128
MAX_POOL_SIZE = 64
MAX_MASKED_POOL = 4  # the score kernel reads the mask of wider pools one value a pool: their registers would spill
MAX_BUDGET = 1024
TILES = 64  # pool tiles one score program walks: its q tile is read once for as many
DIMS = (16, 32, 64, 128)  # padded head dims of the table


@dataclass(frozen=True)
class Config:
    """Tile of one kernel and what its binary may use.

    Attributes:
        rows, items: the tile: query rows by pools (score), or ids by candidates (order); ``items`` alone elsewhere.
        warps, stages: launch options.
        registers: most registers per thread (VGPRs on AMD).
        shared: most shared memory per program, bytes.
        cap: registers the compiler is held to, or None to leave them to it (NVIDIA alone).
    """

    rows: int
    items: int
    warps: int
    stages: int
    registers: int
    shared: int
    cap: int | None = None

    def options(self, *, fusion: bool) -> dict[str, int | bool]:
        """Launch options. ``fusion`` (of multiply and add) is always said: its default differs between versions."""
        held = {} if self.cap is None else {"maxnreg": self.cap}
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": fusion, **held}


@dataclass(frozen=True)
class ScoreTiles:
    """One row of the score table: tile, launch options, and budgets.

    Attributes:
        rows, pools, warps, stages: as in `Config`.
        registers: most registers per thread, any D, windows only.
        masked: the same with an explicit mask.
        shared: most shared memory per program for each of `DIMS`, bytes.
        cap: as in `Config`, windows only: with 128, two programs of 8 warps fit on a multiprocessor.
    """

    rows: int
    pools: int
    warps: int
    stages: int
    registers: int
    masked: int
    shared: tuple[int, int, int, int]
    cap: int | None = None


# target -> heads rounded up to a power of two -> tile and budgets: the worst of Triton 3.7.1 and 3.9, in steps of 8
SCORE: dict[str, dict[int, ScoreTiles]] = {
    "sm_80": {
        1: ScoreTiles(16, 64, 4, 2, 80, 128, (6656, 9216, 14336, 24576)),
        2: ScoreTiles(16, 64, 4, 2, 80, 128, (7168, 10240, 16384, 28672)),
        4: ScoreTiles(16, 64, 4, 2, 128, 144, (8192, 12288, 20480, 36864)),
        8: ScoreTiles(8, 64, 4, 2, 128, 128, (6144, 10240, 18432, 34816)),
        16: ScoreTiles(4, 64, 4, 2, 128, 128, (6144, 10240, 18432, 34816)),
        32: ScoreTiles(4, 64, 4, 2, 168, 168, (10240, 16384, 28672, 53248)),
        64: ScoreTiles(2, 64, 4, 2, 168, 168, (10240, 16384, 28672, 53248)),
    },
    "sm_90": {
        1: ScoreTiles(16, 64, 8, 2, 64, 88, (8704, 13312, 22528, 40960)),
        2: ScoreTiles(16, 64, 8, 2, 64, 96, (9216, 14336, 24576, 45056)),
        4: ScoreTiles(16, 64, 8, 2, 80, 104, (10240, 16384, 28672, 53248)),
        8: ScoreTiles(16, 64, 8, 2, 112, 128, (12288, 20480, 36864, 69632)),
        16: ScoreTiles(8, 64, 8, 2, 104, 104, (10240, 18432, 34816, 67584)),
        32: ScoreTiles(8, 64, 8, 2, 128, 160, (14336, 26624, 51200, 100352), cap=128),
        64: ScoreTiles(4, 64, 8, 2, 128, 144, (13312, 25600, 50176, 99328), cap=128),
    },
    "sm_100": {
        1: ScoreTiles(16, 64, 8, 2, 104, 128, (8720, 13328, 22544, 40976)),
        2: ScoreTiles(16, 64, 8, 2, 104, 128, (9232, 14352, 24592, 45072)),
        4: ScoreTiles(16, 64, 8, 2, 112, 144, (10256, 16400, 28688, 53264)),
        8: ScoreTiles(8, 64, 8, 2, 112, 128, (8208, 14352, 26640, 51216)),
        16: ScoreTiles(4, 64, 8, 2, 104, 120, (7184, 13328, 25616, 50192)),
        32: ScoreTiles(8, 64, 8, 2, 208, 232, (14352, 26640, 51216, 100368)),
        64: ScoreTiles(4, 64, 8, 2, 200, 224, (13328, 25616, 50192, 99344)),
    },
    "gfx942": {
        1: ScoreTiles(16, 64, 8, 2, 120, 128, (6144, 8192, 12288, 20480)),
        2: ScoreTiles(16, 64, 8, 2, 176, 184, (6144, 8192, 12288, 20480)),
        4: ScoreTiles(16, 64, 8, 2, 168, 184, (6144, 8192, 12288, 20480)),
        8: ScoreTiles(16, 64, 8, 2, 160, 176, (6144, 8192, 16384, 32768)),
        16: ScoreTiles(8, 64, 8, 2, 160, 168, (4096, 8192, 16384, 32768)),
        32: ScoreTiles(4, 128, 8, 2, 216, 232, (6144, 10240, 18432, 34816)),
        64: ScoreTiles(2, 128, 8, 2, 216, 216, (6144, 10240, 18432, 34816)),
    },
}


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``: 1, 2, 4, 4, 8 for 1, 2, 3, 4, 5."""
    return 1 << max(n - 1, 0).bit_length()


# the other kernels' tiles serve every target; budgets are the worst of the four
PRUNE = Config(rows=1, items=1024, warps=8, stages=2, registers=80, shared=8192)
SELECT = Config(rows=1, items=1024, warps=4, stages=2, registers=96, shared=8192)
ORDER = {
    64: Config(rows=64, items=16, warps=1, stages=2, registers=128, shared=256),
    256: Config(rows=256, items=16, warps=4, stages=2, registers=128, shared=1024),
    512: Config(rows=512, items=16, warps=8, stages=2, registers=128, shared=2048),
    1024: Config(rows=1024, items=8, warps=8, stages=2, registers=128, shared=4096),
}
POOL_REGISTERS = 144
POOL_SHARED = 512


def score_config(target: str, heads: int, dim: int, *, masked: bool = False) -> Config:
    """The score kernel's tile for ``heads`` and ``dim`` on ``target``."""
    tiles = SCORE[target][power_of_two(heads)]
    shared = tiles.shared[DIMS.index(max(16, power_of_two(dim)))]
    registers = tiles.masked if masked else tiles.registers
    cap = None if masked else tiles.cap
    return Config(tiles.rows, tiles.pools, tiles.warps, tiles.stages, registers, shared, cap)


def order_config(budget: int) -> Config:
    """The order kernel's tile for a budget: the narrowest that holds it."""
    return ORDER[min(width for width in ORDER if width >= budget)]


def pool_config(pool_size: int) -> Config:
    """The pool kernel's tile: fewer pools where each holds more slots, which are all held at once."""
    items = max(1, min(16, 64 // power_of_two(pool_size)))
    return Config(1, items, 4, 2, POOL_REGISTERS, POOL_SHARED)


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def require_triton() -> None:
    """Raise ImportError with the remedy where the package ``triton`` is missing."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("kpool.triton needs the package triton: pip install 'kpool[triton]'")


def target(device: torch.device) -> str:
    """The row of the table for ``device``; under the interpreter, and for fake tensors without a GPU, that of sm_90.

    Raises:
        ValueError: a GPU that is not in the table.
    """
    if device.type == "cpu" and not interpreted():
        raise ValueError("q: expected a tensor on a GPU (or TRITON_INTERPRET=1), got one on the CPU")
    if device.type == "cpu" or not torch.cuda.is_available():
        return "sm_90"
    name = _architecture(device)
    if name not in TARGETS:
        raise ValueError(f"q: expected a GPU among {', '.join(TARGETS)}, got {name}")
    return name


def _architecture(device: torch.device) -> str:
    """The table's name of a CUDA or HIP device: minor revisions share the row of their family."""
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    return str(properties.gcnArchName).split(":")[0] if torch.version.hip else f"sm_{properties.major}0"


def unsupported_reason(
    *, dtype: torch.dtype, heads: int, dim: int, pool_size: int, budget: int, device: torch.device | None = None
) -> str | None:
    """Why the kernels cannot serve a call, or None if they can; decided from what every rank of a group shares.

    Args:
        dtype: of q; the kernels take bf16, whose products are exact in fp32.
        heads, dim, pool_size, budget: ``H``, ``D``, ``P``, ``M``.
        device: of q; None for the current one. The ranks of a group have GPUs of one kind.
    """
    if dtype is not torch.bfloat16:
        return f"the kernels take bfloat16, q is {str(dtype).removeprefix('torch.')}"
    for name, value, most in (
        ("H", heads, MAX_HEADS),
        ("D", dim, MAX_DIM),
        ("P", pool_size, MAX_POOL_SIZE),
        ("M", budget, MAX_BUDGET),
    ):
        if not 1 <= value <= most:
            return f"the kernels take {name} from 1 to {most}, this call has {value}"
    if torch.cuda.is_available() and (device is None or device.type == "cuda"):
        name = _architecture(torch.device("cuda") if device is None else device)
        if name not in TARGETS:
            return f"the GPU is {name}, the table has {', '.join(TARGETS)}"
    return None
