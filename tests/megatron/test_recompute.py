"""Activation recompute, layers that share a selection, and the opt-in check of replicated inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch.utils.checkpoint import checkpoint

from kpool_testing import Run, assert_replicated
from tests.megatron.support import (
    Case,
    Mesh,
    build_attention,
    check_gathers,
    inputs,
    packed_params,
    run,
    step,
)

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("case", [Case(tp=2, batch=2), Case(tp=2, sp=True, docs=(20, 28)), Case(tp=2, cp=2)])
def test_recompute_repeats_selection_and_gather(case: Case, reentrant: bool) -> None:
    case = case.with_flag(True)

    def recomputed(attention: Any) -> Any:
        def call(**kwargs: Any) -> torch.Tensor:
            names = ("query", "key", "value", "x", "qr")
            rest = {name: value for name, value in kwargs.items() if name not in names}

            def body(*tensors: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = attention(**dict(zip(names, tensors, strict=True)), **rest)
                return output

            out: torch.Tensor = checkpoint(body, *(kwargs[name] for name in names), use_reentrant=reentrant)
            return out

        return call

    plain = run(lambda world: step(world, case), case.tp * case.cp)
    twice = run(lambda world: step(world, case, wrap=recomputed), case.tp * case.cp)
    check_gathers(plain, case)
    check_gathers(twice, case, calls=2)
    for before, after in zip(plain.results, twice.results, strict=True):
        first, second = after.pop("selections")
        assert_replicated([first, second], "selection of forward and of recomputation")
        del before["selections"]
        assert_replicated([before, after], "with and without recompute")


def test_a_later_layer_reuses_the_selection() -> None:
    case = Case(docs=(20, 28), config={"dsa_indexer_topk_freq": 2, "num_layers": 2})
    first, second = (build_attention(case, layer_number=number) for number in (1, 2))
    assert first.indexer is not None and second.indexer is None
    given, params = inputs(case), packed_params(case)
    options = {"attention_mask": None, "attn_mask_type": AttnMaskType.causal, "packed_seq_params": params}
    with pytest.raises(RuntimeError, match="needs top-k indices from source computing layer 1"):
        second(**given, **options)
    output = first(**given, **options)
    # the attention itself has no parameters: the same query, key, value and selection give the same output
    assert_replicated([output, second(**given, **options)])
    other = {**given, "x": given["x"].flip(0)}
    assert_replicated([output, second(**other, **options)], "a layer without an indexer does not look at x")
    assert not torch.equal(output, first(**other, **options))


def checked(case: Case, calls: int, odd: int | None = None) -> Run:
    """Several selections of one indexer; rank `odd` has another hidden state."""

    def body(world: Any) -> torch.Tensor:
        mesh = Mesh.of(world, case)
        indexer = build_attention(case, mesh.tp, mesh.cp).indexer
        given = inputs(case)
        if world.rank() == odd:
            given["x"][5] += 1
        return torch.stack([indexer(given["x"], given["qr"]) for _ in range(calls)])

    return run(body, case.tp)


def test_inputs_are_compared_every_so_many_calls() -> None:
    case = Case(tp=2, flag=True, options={"check_replicated": 3})
    found = checked(case, calls=7)
    check_gathers(found, case, calls=7)
    sums = [call for call in found.trace if call.dtype == "int64" and call.rank == 0]
    assert len(sums) == 3  # calls 1, 4 and 7
    never = checked(Case(tp=2, flag=True), calls=3)
    assert not [call for call in never.trace if call.dtype == "int64"]
    unshared = checked(Case(tp=2, options={"check_replicated": 1}), calls=2)
    assert not list(unshared.trace)


def test_different_inputs_are_named() -> None:
    case = Case(tp=3, flag=True, options={"check_replicated": 1})
    with pytest.raises(RuntimeError, match=r"rank \[1\] differ from the majority; first differing row .*: 5"):
        checked(case, calls=1, odd=1)
    assert len(checked(Case(tp=3, flag=True), calls=1, odd=1)) == 3  # unchecked, nobody notices
