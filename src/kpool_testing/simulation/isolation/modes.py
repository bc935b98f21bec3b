"""The thread-local torch modes of whoever calls `simulate`, carried into the threads of the ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.overrides
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# Untyped in torch.
_function_modes: Callable[[], Any] = torch.overrides._get_current_function_mode_stack
_cuda_started: Callable[[], bool] = torch.cuda.is_initialized


class CallerModes:
    """The thread-local torch modes of the thread that calls `simulate`, to be entered in every rank's thread.

    Raises RuntimeError for modes that cannot be carried: dispatch modes, torch-function modes other than a default
    device, saved-tensor hooks and function transforms. Enter those inside fn.
    """

    def __init__(self) -> None:
        modes: list[Any] = list(_function_modes())
        foreign = [mode for mode in modes if not isinstance(mode, DeviceContext)]
        foreign += _get_current_dispatch_mode_stack()
        if foreign:
            names = sorted({type(mode).__name__ for mode in foreign})
            raise RuntimeError(
                f"simulate was called under {', '.join(names)}, which does not reach the ranks' threads; "
                "enter it inside fn"
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("simulate was called inside a torch.func transform; apply the transform inside fn")
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise RuntimeError("simulate was called under saved-tensor hooks; enter them inside fn")
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.cache = torch.is_autocast_cache_enabled()
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
        self.device = torch.get_default_device() if modes else None
        self.cuda = torch.cuda.current_device() if _cuda_started() else None

    def enter(self, stack: ExitStack) -> None:
        """Enter the modes in the current thread."""
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if self.inference:
            stack.enter_context(torch.inference_mode())
        torch.set_grad_enabled(self.grad)
        for kind, dtype in self.autocast.items():
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if self.device is not None:
            torch.set_default_device(self.device)
        if self.cuda is not None:
            torch.cuda.set_device(self.cuda)
