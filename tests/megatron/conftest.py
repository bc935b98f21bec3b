"""megatron-core is imported once, quietly: it warns about every optional package that is not there."""

from __future__ import annotations

import importlib.util
import warnings

# Without megatron-core these files cannot even be collected; `pytest -m megatron` then fails, having nothing to run.
collect_ignore_glob = [] if importlib.util.find_spec("megatron") else ["test_*.py"]

if importlib.util.find_spec("megatron"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.models.gpt.experimental_attention_variant_module_specs
        import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
