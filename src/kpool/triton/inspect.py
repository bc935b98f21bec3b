"""Compile every entry of the table ahead of time, read the machine code, and hold it to its budget.

    python -m kpool.triton.inspect                      the whole table, every target
    python -m kpool.triton.inspect --target sm_90       one target
    python -m kpool.triton.inspect --released           only GLM-5.3-Flash's geometry (H 32, D 128, P 4, M 512)

No GPU is needed. Exits with 1 if a kernel spills, uses more registers or shared memory than its budget, or lacks the
matrix instruction of its target.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kpool.triton import configs

configs.require_triton()

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from kpool.triton.pool import pool_kernel  # noqa: E402
from kpool.triton.score import GROUP, score_kernel  # noqa: E402
from kpool.triton.select import order_kernel, prune_kernel, select_kernel  # noqa: E402

MATRIX_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "gfx942": "v_mfma"}
_ROWS = 1 << 16  # S of the example call whose strides decide what Triton specialises on


@dataclass(frozen=True)
class Entry:
    """One binary of the table: a kernel, its compile-time values, an example of its run-time integers, its budget."""

    name: str
    target: str
    kernel: Any
    pointers: dict[str, str]
    integers: dict[str, int]
    constants: dict[str, Any]
    config: configs.Config
    fusion: bool = False
    matrix: bool = False
    floats: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What the binary of an entry uses.

    Attributes:
        registers, spills, shared: per thread, spilled bytes (or registers on AMD), bytes per program.
        instructions: machine instructions by opcode.
        occupancy: programs that fit on one multiprocessor.
        faults: budget overruns, in words; empty if all is well.
    """

    entry: Entry
    registers: int
    spills: int
    shared: int
    matrix: int
    occupancy: int
    faults: tuple[str, ...]
    instructions: dict[str, int] = field(default_factory=dict)


def entries(targets: Iterable[str] = configs.TARGETS, *, released: bool = False) -> Iterator[Entry]:
    """Every binary of the table for ``targets``; with ``released`` only those of GLM-5.3-Flash's geometry."""
    for target in targets:
        heads = (32,) if released else tuple(configs.SCORE[target])
        dims = (128,) if released else configs.DIMS
        for h in heads:
            for d in dims:
                yield score_entry(target, h, d)
                yield score_entry(target, h, d, masked=True)
        yield score_entry(target, 32, 128, relu=False)
        yield score_entry(target, 32, 128, scaled=True)
        if not released:
            yield score_entry(target, 3, 8)
        for pool_size in (4,) if released else (2, 4, 16):
            for numerics in ("megatron", "hf"):
                yield pool_entry(target, pool_size, numerics)
        yield from _select_entries(target, (512,) if released else tuple(configs.ORDER))


def score_entry(
    target: str, heads: int, dim: int, *, masked: bool = False, relu: bool = True, scaled: bool = False
) -> Entry:
    """The score kernel for ``heads`` and ``dim`` as a contiguous batch-1 call would specialise it."""
    config = configs.score_config(target, heads, dim, masked=masked)
    pool_size = 4
    pools = _ROWS // pool_size
    integers = {
        "q_row": heads * dim, "q_batch": heads * dim, "q_head": dim, "q_dim": 1,
        "k_pool": dim, "k_batch": dim, "k_dim": 1, "w_row": heads, "w_batch": heads, "w_head": 1,
        "v_batch": 0, "m_batch": 0, "m_row": _ROWS if masked else 0, "m_token": 1 if masked else 0,
        "pools": pools, "ld": pools,
    }  # fmt: skip
    constants = {
        "H": heads, "HP": configs.power_of_two(heads), "D": dim, "DP": max(16, configs.power_of_two(dim)),
        "R": config.rows, "BN": config.items, "TILES": configs.TILES, "P": pool_size if masked else 1,
        "RELU": relu, "SCALED": scaled, "MASKED": masked, "UPCAST": False,
    }  # fmt: skip
    pointers = {
        "q": "*bf16", "keys": "*bf16", "weights": "*fp32", "pool_lo": "*i32", "pool_hi": "*i32",
        "mask": "*fp32", "out": "*i32", "best": "*i32",
    }  # fmt: skip
    extra = (" mask" if masked else "") + ("" if relu else " identity") + (" scaled" if scaled else "")
    name = f"score H{heads} D{dim}{extra}"
    return Entry(name, target, score_kernel, pointers, integers, constants, config, True, True, ("dot_scale",))


def pool_entry(target: str, pool_size: int, numerics: str) -> Entry:
    """The pool kernel for bf16 keys and gates, D 128."""
    dim, pools = 128, _ROWS // pool_size
    config = configs.pool_config(pool_size)
    integers = dict.fromkeys(("k_token", "k_batch", "g_token", "g_batch"), dim) | {
        "k_dim": 1, "g_dim": 1, "start_batch": 0, "pools": pools, "batch": 1,
    }  # fmt: skip
    constants = {
        "P": pool_size, "D": dim, "BD": dim, "BN": config.items, "HAS_GATE": True, "HAS_APE": True,
        "HF": numerics == "hf", "INTERPRET": False,
    }  # fmt: skip
    pointers = {"keys": "*bf16", "gate": "*bf16", "ape": "*fp32", "starts": "*i32", "out": "*bf16"}
    return Entry(f"pool P{pool_size} {numerics}", target, pool_kernel, pointers, integers, constants, config)


def _select_entries(target: str, widths: tuple[int, ...]) -> Iterator[Entry]:
    group = int(GROUP.value)
    pools = _ROWS // 4
    common = {"v_batch": 0, "pools": pools, "budget": 512}
    ids = dict.fromkeys(("pool_lo", "pool_hi", "groups", "stay"), "*i32")
    yield Entry(
        "prune", target, prune_kernel, ids | {"best": "*i32"}, common | {"groups_ld": pools // group},
        {"BLOCK": configs.PRUNE.items}, configs.PRUNE,
    )  # fmt: skip
    yield Entry(
        "select", target, select_kernel, ids | {"keys": "*i32", "out": "*i32"}, common | {"ld": pools},
        {"WIDTH": configs.MAX_BUDGET, "BLOCK": configs.SELECT.items}, configs.SELECT,
    )  # fmt: skip
    for width in widths:
        config = configs.order_config(width)
        pointers = dict.fromkeys(("keys", "ascending", "out"), "*i32")
        constants = {"WIDTH": config.rows, "PIECE": config.items}
        yield Entry(
            f"order M{width}", target, order_kernel, pointers, {"ld": pools, "budget": width}, constants, config
        )


def compile_entry(entry: Entry) -> Any:
    """Compile ``entry`` for its target, specialising integers as a launch would: 1 is a constant, 16 | x is noted."""
    fixed = {p.name for p in entry.kernel.params if p.do_not_specialize}
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    constants = dict(entry.constants)
    for position, name in enumerate(entry.kernel.arg_names):
        value = entry.integers.get(name)
        if name in entry.constants or (value == 1 and name not in fixed):
            signature[name] = "constexpr"
            constants.setdefault(name, 1)
            continue
        signature[name] = entry.pointers.get(name, "fp32" if name in entry.floats else "i32")
        if name in entry.pointers or (value is not None and value % 16 == 0 and name not in fixed):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=entry.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=_gpu(entry.target), options=entry.config.options(fusion=entry.fusion))


def examine(entry: Entry, compiled: Any = None) -> Report:
    """Compile ``entry`` if need be, read registers, spills, shared memory and instructions, compare with the budget."""
    compiled = compile_entry(entry) if compiled is None else compiled
    read = _read_nvidia if entry.target.startswith("sm_") else _read_amd
    registers, spills, instructions = read(compiled)
    shared = int(compiled.metadata.shared)
    wanted = MATRIX_INSTRUCTION[entry.target]
    matrix = sum(n for op, n in instructions.items() if op.startswith(wanted))
    faults = []
    if spills:
        faults.append(f"{spills} spilled")
    if registers > entry.config.registers:
        faults.append(f"registers {registers} > {entry.config.registers}")
    if shared > entry.config.shared:
        faults.append(f"shared memory {shared} > {entry.config.shared}")
    if entry.matrix and not matrix:
        faults.append(f"no {wanted}")
    occupancy = _occupancy(entry.target, registers, shared, entry.config.warps)
    return Report(entry, registers, spills, shared, matrix, occupancy, tuple(faults), instructions)


def _gpu(target: str) -> GPUTarget:
    if target.startswith("sm_"):
        return GPUTarget("cuda", int(target[3:]), 32)
    return GPUTarget("hip", target, 64)


def _read_nvidia(compiled: Any) -> tuple[int, int, dict[str, int]]:
    """Registers and stack bytes from the resource record, instructions from the disassembly."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        usage = _output([str(tools / "cuobjdump"), "-res-usage", str(binary)])
        listing = _output([str(tools / "nvdisasm"), "-c", str(binary)])
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage: expected REG and STACK figures, got {usage!r}")
    instructions = _count(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", listing, re.M))
    local = instructions.get("LDL", 0) + instructions.get("STL", 0)
    return int(found[1]), max(int(found[2]), local), instructions


def _read_amd(compiled: Any) -> tuple[int, int, dict[str, int]]:
    """The same from the code object's metadata; accumulation registers share the file and count as registers."""
    text = compiled.asm["amdgcn"]

    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        if found is None:
            raise RuntimeError(f"amdgcn metadata: expected .{name}, found none")
        return int(found[1])

    spills = figure("vgpr_spill_count") + figure("sgpr_spill_count") + figure("private_segment_fixed_size")
    instructions = _count(re.findall(r"^\s+([a-z]\w+)", text, re.M))
    return figure("vgpr_count"), spills, instructions


def _count(words: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _occupancy(target: str, registers: int, shared: int, warps: int) -> int:
    """Programs that fit on one multiprocessor, from the register file, shared memory and the warp limit."""
    if target == "gfx942":  # four SIMDs of 512 VGPRs and 8 waves each; 64 KiB of LDS
        waves = 4 * min(8, 512 // max(8, -(-registers // 8) * 8))
        return min(waves // warps, 65536 // max(shared, 1))
    capacity = {"sm_80": 164, "sm_90": 228, "sm_100": 228}[target] * 1024
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, capacity // (shared + 1024), 64 // warps)


def table(reports: Iterable[Report]) -> Iterator[str]:
    """The reports as aligned lines, header first."""
    yield (
        f"{'target':7} {'kernel':26} {'warps':>5} {'regs':>5} {'<=':>4} {'spills':>6} {'shared':>7} {'<=':>7} "
        f"{'matrix':>14} {'fit':>4}"
    )
    for r in reports:
        matrix = f"{r.matrix} {MATRIX_INSTRUCTION[r.entry.target]}" if r.matrix else "-"
        config = r.entry.config
        yield (
            f"{r.entry.target:7} {r.entry.name:26} {config.warps:5} {r.registers:5} {config.registers:4} {r.spills:6} "
            f"{r.shared:7} {config.shared:7} {matrix:>14} {r.occupancy:4}  {'; '.join(r.faults) or 'ok'}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 if every entry keeps its budget, else 1."""
    parser = argparse.ArgumentParser(prog="python -m kpool.triton.inspect", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=configs.TARGETS, help="only this target (repeatable)")
    parser.add_argument("--released", action="store_true", help="only the geometry of GLM-5.3-Flash")
    parser.add_argument("--kernel", default="", metavar="NAME", help="only the entries of this name")
    options = parser.parse_args(arguments)
    if configs.interpreted():
        parser.error("TRITON_INTERPRET is set: the interpreter compiles nothing; unset it")
    failed = 0

    def watched() -> Iterator[Report]:
        nonlocal failed
        for entry in entries(options.target or configs.TARGETS, released=options.released):
            if options.kernel and entry.name != options.kernel:
                continue
            report = examine(entry)
            failed += bool(report.faults)
            yield report

    for line in table(watched()):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    if failed:
        sys.stdout.write(f"{failed} entries spill, overrun their budget or lack their matrix instruction\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
