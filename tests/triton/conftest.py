"""The Triton kernels: on the GPU where there is one, else in Triton's interpreter, on CPU tensors.

The interpreter has to be asked for before Triton is first imported, so it is asked for while tests are collected.
Without the package triton (the `no-triton` arm) this directory has nothing to test and is not collected.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
elif not torch.cuda.is_available():
    late = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
    if late:
        raise pytest.UsageError(
            "triton was imported before tests/triton asked for its interpreter; set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_with_index(tensor: type, scope: Any) -> None:
        """Triton 3.6 turns one-element arrays into loop bounds by `int`, which numpy 2.4 no longer allows."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_with_index


@pytest.fixture
def gpu() -> torch.device:
    """Where the kernels run: a CUDA device, or the CPU under the interpreter."""
    from kpool.triton import configs

    return torch.device("cpu" if configs.interpreted() else "cuda")


@pytest.fixture(autouse=True)
def _quiet_arithmetic() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of NaN and infinities; here they are inputs."""
    with numpy.errstate(all="ignore"):
        yield
