"""Around the kernels: the operator as torch sees it, pieces of rows, the table, and life without Triton."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kpool import dispatch
from kpool.sharding import RowBlocks
from kpool.triton import configs, launch
from kpool.triton.pieces import pieces
from tests.conformance.test_compiled import compiled
from tests.support.calls import exact_call
from tests.support.properties import same_rows
from tests.triton.cases import Case, build

CASE = Case("operator", rows=2, tokens=24, budget=2)


def operator_arguments(gpu: torch.device) -> tuple[Any, ...]:
    built = build(CASE, gpu)
    return (*built.tensors, None, 4, 2, [0, 2, 2, 2], True, 1.0, "none", "score", 1 << 20)


def test_one_opaque_operator(gpu: torch.device) -> None:
    """torch's own checks: schema, fake implementation, no hidden mutation."""
    torch.library.opcheck(
        torch.ops.kpool.select_triton.default, operator_arguments(gpu), test_utils=("test_schema", "test_faketensor")
    )


def test_fake_cuda_tensors_meet_no_kernel_and_no_sync() -> None:
    """Under FakeTensorMode a call on (absent) CUDA devices gives a shape and reads nothing."""
    with FakeTensorMode():
        q = torch.empty(1000, 2, 32, 128, dtype=torch.bfloat16, device="cuda")
        keys = torch.empty(250, 2, 128, dtype=torch.bfloat16, device="cuda")
        bounds = torch.empty(1, 1000, dtype=torch.int32, device="cuda")
        ids = launch.select(
            q, keys, torch.empty(1000, 2, 32, device="cuda"), bounds, bounds, None, pool_size=4, budget=64,
            rows=RowBlocks(0, 125, 1000, 125), use_relu=True, dot_scale=1.0, transform="none", order="score",
            chunk_bytes=1 << 20,
        )  # fmt: skip
    assert ids.shape == (2, 125, 64) and ids.dtype == torch.int32 and ids.device.type == "cuda"


def test_compiled_and_checkpointed_calls_repeat(gpu: torch.device) -> None:
    built = build(CASE, gpu)
    plain = built.select(launch)

    def call(q: torch.Tensor) -> torch.Tensor:
        ids = replace(built, tensors=(q, *built.tensors[1:])).select(launch)
        return q.float().sum() + ids.sum()

    q = built.tensors[0].float().requires_grad_()
    compiled = torch.compile(lambda: replace(built).select(launch), backend="eager", fullgraph=True)
    assert torch.equal(compiled(), plain)
    total = checkpoint(lambda x: call(x.bfloat16()), q, use_reentrant=False)
    total.backward()
    assert torch.equal(q.grad, torch.ones_like(q))


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize(
    ("layout", "options"),
    [("causal", {}), ("packed", {"order": "position"}), ("mask", {}), ("window", {"fp8_indexer": True})],
)
def test_the_fused_call_compiles_around_its_kernels(
    layout: str, options: dict[str, Any], gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooled, scored and selected by kernels inside one graph; the interpreter's tensors are let in for this."""
    if configs.interpreted():
        monkeypatch.setattr(dispatch, "why_not_triton", lambda *arguments: None)
    torch._dynamo.reset()
    call = exact_call(13, layout, rows=24, dim=8, pool_size=4, **options).to(gpu)
    tokens = compiled(call.with_options(impl="triton"))
    assert same_rows(call.run(impl="triton"), tokens, layout) == 24
    assert same_rows(call.by_definition(), tokens, "reference") == 24


@given(
    st.integers(0, 60), st.integers(1, 40), st.integers(0, 90), st.integers(0, 70), st.sampled_from([2, 4, 8]),
    st.integers(1, 6),
)  # fmt: skip
def test_pieces_cover_every_local_row_once(
    offset: int, block: int, gap: int, count: int, tile: int, tiles: int
) -> None:
    rows = RowBlocks(offset, block, block + gap, count)
    where = lambda r, i: i // r.block * r.stride + r.offset + i % r.block  # noqa: E731
    covered = []
    for first, piece in pieces(rows, tile * tiles, tile):
        assert 1 <= piece.count <= tile * tiles
        covered += [first + i for i in range(piece.count)]
        assert [where(piece, i) for i in range(piece.count)] == [where(rows, first + i) for i in range(piece.count)]
    assert covered == list(range(count))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": torch.float16}, "bfloat16, q is float16"),
        ({"heads": 65}, "H from 1 to 64"),
        ({"dim": 256}, "D from 1 to 128"),
        ({"pool_size": 65}, "P from 1 to 64"),
        ({"budget": 1025}, "M from 1 to 1024"),
    ],
)
def test_says_why_a_call_is_not_served(changes: dict[str, Any], says: str) -> None:
    released = {"dtype": torch.bfloat16, "heads": 32, "dim": 128, "pool_size": 4, "budget": 512}
    assert configs.unsupported_reason(**released) is None
    reason = configs.unsupported_reason(**{**released, **changes})
    assert reason is not None and says in reason


def test_every_served_size_has_a_tile() -> None:
    for target in configs.TARGETS:
        for heads in range(1, configs.MAX_HEADS + 1):
            for dim in range(1, configs.MAX_DIM + 1):
                config = configs.score_config(target, heads, dim)
                assert config.rows * configs.power_of_two(heads) >= 16 and config.items % 16 == 0
    for budget in range(1, configs.MAX_BUDGET + 1):
        assert configs.order_config(budget).rows >= budget


def in_a_new_python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.interpret
def test_importing_kpool_does_not_import_triton_and_without_it_the_error_says_what_to_install() -> None:
    program = """
import sys
import kpool, kpool.triton
from kpool.triton import configs
assert "triton" not in sys.modules, "kpool imported triton"
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
try:
    from kpool.triton import select
except ImportError as error:
    print(error)
"""
    assert "pip install 'kpool[triton]'" in in_a_new_python(program)
