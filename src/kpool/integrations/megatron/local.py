"""A backend for Megatron's specs without Transformer Engine: enough to build the attention on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.backends import LocalSpecProvider
from torch import Tensor, nn

from kpool.linear import row_linear


class DuplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole, with Megatron's calling convention.

    The bits of a row do not depend on how many rows are computed with it (on CPU).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = False,
        parallel_mode: str | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        if bias or parallel_mode not in (None, "duplicated"):
            raise ValueError(
                f"DuplicatedLinear: expected no bias and parallel_mode='duplicated', got {bias} and {parallel_mode!r}"
            )
        on_cpu = config.use_cpu_initialization or not torch.cuda.is_available()
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        if config.perform_initialization:
            with torch.no_grad():
                init_method(self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`(x @ weight.T, None)`: the second is the bias Megatron expects to be told about."""
        return row_linear(x, self.weight), None


class PlainLayerNorm(nn.LayerNorm):
    """A layer norm that takes Megatron's arguments; unlike `WrappedTorchNorm` it goes with sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        if config.layernorm_zero_centered_gamma:
            raise ValueError("layernorm_zero_centered_gamma: expected False without Transformer Engine, got True")
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class KPoolLocalSpecProvider(LocalSpecProvider):  # type: ignore[misc]
    """`LocalSpecProvider` with the two things the sparse attention needs and it lacks."""

    def linear(self) -> type:
        """The class of duplicated projections."""
        return DuplicatedLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        """The class of norms; RMS norms are those of `LocalSpecProvider`."""
        if rms_norm:
            return super().layer_norm(rms_norm=rms_norm, for_qk=for_qk, has_residual=has_residual)
        return PlainLayerNorm
