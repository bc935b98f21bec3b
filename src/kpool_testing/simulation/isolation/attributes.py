"""Attributes of torch's modules that hold state of a process, and what a new process has there."""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.nn.modules.module as modules

Fresh = Callable[[Any], Any]


def _none(value: Any) -> None:
    return None


def _same(value: Any) -> Any:
    return value


def _empty(value: Any) -> Any:
    return type(value)()


def _lock(value: Any) -> Any:
    return threading.RLock()


def _without_groups(defaults: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Default arguments that stand for the default group of whoever calls, not of the rank that loaded the module."""
    if defaults is None:
        return None
    return tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


_DISTRIBUTED: dict[tuple[str, str], Fresh] = {
    ("torch.distributed.distributed_c10d", "default_pg_timeout"): _same,
    ("torch.distributed.distributed_c10d", "default_pg_nccl_timeout"): _same,
    ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler.__init__.__defaults__"): _without_groups,
    ("torch.distributed.tensor._random", "_rng_tracker"): _none,
    ("torch.distributed.tensor._redistribute", "_FORCE_MIN_COST_REDISTRIBUTION_PLAN"): _same,
    ("torch.distributed.tensor._redistribute", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION"): _same,
    ("torch.distributed.tensor", "DTensor._op_dispatcher._custom_op_handlers"): copy.copy,
    ("torch.distributed.checkpoint.planner", "SavePlanner._cached_save_plan"): _empty,
    ("torch.distributed.checkpoint.planner", "SavePlanner._cached_final_save_plan"): _empty,
    ("torch.distributed.checkpoint.planner", "SavePlanner._cached_all_plans"): _empty,
    ("torch.distributed.checkpoint.planner", "SavePlanner._cached_global_plan"): _empty,
    ("torch.distributed.checkpoint.planner", "SavePlanner._cached_metadata"): _empty,
    ("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP"): _none,
    ("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module"): _none,
}

_TORCH: dict[tuple[str, str], Fresh] = {
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"): copy.copy,
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"): copy.copy,
    ("torch.nn.utils.parametrize", "_cache_enabled"): _same,
    ("torch.nn.utils.parametrize", "_cache"): copy.copy,
    ("torch.utils.checkpoint", "_enable_checkpoint_early_stop"): _same,
    ("torch.utils.checkpoint", "_checkpoint_debug_enabled"): _same,
    ("torch.utils.checkpoint", "DefaultDeviceType._default_device_type"): _same,
    ("torch.utils._python_dispatch", "_is_in_torch_dispatch_mode"): _same,
    ("torch.utils._python_dispatch", "_is_in_non_infra_torch_dispatch_mode"): _same,
    ("torch.utils._python_dispatch", "_is_in_any_mode_without_ignore_compile_internals"): _same,
    ("torch._tensor_str", "PRINT_OPTS"): copy.copy,
    ("torch.autograd.forward_ad", "_current_level"): lambda value: -1,
    ("torch._functorch.eager_transforms", "JVP_NESTING"): lambda value: 0,
    ("torch.__future__", "_overwrite_module_params_on_conversion"): _same,
    ("torch.__future__", "_swap_module_params_on_conversion"): _same,
    ("torch.fx.experimental.proxy_tensor", "_CURRENT_MAKE_FX_TRACER"): _same,
    ("torch.autograd.graph", "_allow_mutation_on_saved_tensors_enabled"): _same,
}

# What Dynamo has learnt about a rank's calls, and where it is in compiling; see `compiled`.
_DYNAMO: dict[tuple[str, str], Fresh] = {
    ("torch._dynamo.pgo", "_CODE_STATE"): _none,
    ("torch._dynamo.pgo", "_INIT_CODE_STATE"): _none,
    ("torch._dynamo.pgo", "_KNOWN_DYNAMIC_SOURCES"): _empty,
    ("torch._dynamo.eval_frame", "_stance"): _same,
    ("torch._dynamo.eval_frame", "_EXAMPLE_INPUTS"): _none,
    ("torch._dynamo.eval_frame", "_in_optimized_module"): lambda value: False,
    ("torch._dynamo.utils", "_error_on_graph_break"): lambda value: False,
    ("torch._dynamo.convert_frame", "FRAME_COMPILE_COUNTER"): lambda value: collections.Counter(),
    ("torch._dynamo.convert_frame", "initial_global_state"): _none,
    ("torch._dynamo.convert_frame", "compile_lock"): _lock,
    ("torch._dynamo.distributed", "_COMPILE_PG"): _none,
    ("torch._dynamo.distributed", "_GUARD_PG"): _none,
}

_PYTHON: dict[tuple[str, str], Fresh] = {
    ("sys", "stdout"): _same,
    ("sys", "stderr"): _same,
    ("sys", "excepthook"): _same,
}


def places() -> dict[tuple[str, str], Fresh]:
    """Module and attribute, to what a new process has there of what this one has."""
    hooks = {("torch.nn.modules.module", name): copy.copy for name in vars(modules) if name.startswith("_global_")}
    return {**hooks, **_DISTRIBUTED, **_TORCH, **_DYNAMO, **_PYTHON}
