"""What a multi-rank test proves: ranks agree bit for bit, sharded equals whole, no more is sent than expected."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from kpool_testing.bits import first_difference, has_data, raw
from kpool_testing.errors import CollectiveError
from kpool_testing.record.call import canonical_kind
from kpool_testing.record.trace import Run, Trace

LAYOUTS = ("transposed", "strided", "offset")


def assert_replicated(results: Run | Sequence[Any], name: str = "result") -> None:
    """Every rank returned the same, bit for bit: NaN payloads and the sign of zero count.

    Args:
        results: one entry per rank, or a `Run`. Entries are tensors, or tuples, lists, dicts and dataclass-free values
            built from them; everything that is not a tensor is compared with `==`.
        name: what the values are, for the message.

    Raises:
        AssertionError: names every rank that differs from the first, and the first index where it does.
        ValueError: no results, or None from every rank, as of a function that forgot to return.
    """
    __tracebackhide__ = True
    entries = results.results if isinstance(results, Run) else list(results)
    if not entries:
        raise ValueError("expected the results of at least one rank, got none")
    if all(entry is None for entry in entries):
        raise ValueError(f"expected a {name} to compare, got None from every rank; return it from the function")
    found = [(rank, difference(entries[0], entry, name)) for rank, entry in enumerate(entries)]
    lines = [f"  rank {rank}: {text}" for rank, text in found if text is not None]
    if lines:
        ranks = [rank for rank, text in found if text is not None]
        raise AssertionError("\n".join([f"{name} is not replicated: ranks {ranks} differ from rank 0", *lines]))


def difference(expected: Any, got: Any, name: str = "result") -> str | None:
    """Where two results first differ, in words; None if they agree bit for bit."""
    if isinstance(expected, torch.Tensor) and isinstance(got, torch.Tensor):
        return _tensor_difference(expected, got, name)
    if type(expected) is not type(got):
        return f"{name} is {type(got).__name__}, expected {type(expected).__name__}"
    if isinstance(expected, Mapping):
        if expected.keys() != got.keys():
            return f"{name} has keys {sorted(map(str, got))}, expected {sorted(map(str, expected))}"
        pairs = [(f"{name}[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            return f"{name} has {len(got)} entries, expected {len(expected)}"
        pairs = [(f"{name}[{index}]", a, b) for index, (a, b) in enumerate(zip(expected, got, strict=True))]
    else:
        same = expected == got or (expected != expected and got != got)
        return None if same else f"{name} is {got!r}, expected {expected!r}"
    return next((text for key, a, b in pairs if (text := difference(a, b, key)) is not None), None)


def _tensor_difference(expected: torch.Tensor, got: torch.Tensor, name: str) -> str | None:
    for what in ("shape", "dtype"):
        wanted, found = getattr(expected, what), getattr(got, what)
        if wanted != found:
            words = [list(value) if what == "shape" else value for value in (found, wanted)]
            return f"{name} has {what} {words[0]}, expected {words[1]}"
    if not (has_data(expected) and has_data(got)):
        return None if has_data(expected) == has_data(got) else f"{name} has no values on one of the two"
    index = first_difference(expected, got)
    if index is None:
        return None
    left, right = raw(expected).cpu(), raw(got).cpu()
    count = int((left != right).any(dim=1).sum())
    a, b = expected[index].item(), got[index].item()
    shown = f"{b!r}, expected {a!r}"
    if a == b or (a != a and b != b):
        bits = [bytes(raw(tensor[index]).cpu().flatten().tolist()).hex() for tensor in (got, expected)]
        shown = f"bits {bits[0]}, expected {bits[1]}"
    return f"{name}{list(index)} is {shown} ({count} of {expected.numel()} elements differ)"


def assert_matches_unsharded(
    fn: Callable[..., Any],
    sizes: Iterable[int] = (2, 3, 8),
    *,
    cases: Iterable[Any] | None = None,
    combine: Callable[[list[Any]], Any] | None = None,
    runner: Callable[..., Run] | None = None,
    rtol: float = 0.0,
    atol: float = 0.0,
    **options: Any,
) -> int:
    """The oracle sweep: f(G) == f(1) for every group size and case.

    Only this catches a program whose ranks agree with each other on a wrong answer, such as two same-shape calls
    swapped or rows in another order.

    Args:
        fn: `fn(group)`, or `fn(group, case)` with `cases`.
        sizes: group sizes compared with a group of one.
        cases: inputs to sweep, such as lengths.
        combine: makes the whole result of the per-rank ones, `torch.cat` for shards; without it every rank must
            return the whole result.
        runner: `runner(fn, size) -> Run`; `simulate` by default, `replay` or the fixture-like `run_ranks` will do.
        rtol: where a reduction is crossed, a tolerance for floating-point tensors; 0 compares bits.
        atol: the same, absolute.
        options: passed to the runner for every size, not for the group of one (`faults=[Corrupt(rank=1)]`, say).

    Returns:
        The number of comparisons made.

    Raises:
        AssertionError: lists the failing sizes and cases with the first difference, the first of them in full; or says
            that nothing was compared.
        ValueError: `fn` returned None in a group of one, so that there is nothing to compare.
    """
    __tracebackhide__ = True
    if runner is None:
        from kpool_testing.simulation.run import simulate

        runner = simulate
    plain = cases is None
    wanted, failures, made = list(sizes), [], 0
    for case in [None] if cases is None else cases:
        body = fn if plain else lambda group, case=case: fn(group, case)
        label = "" if plain else f", case {case!r}"
        try:
            whole = _whole(runner(body, 1).results, combine)[0]
        except CollectiveError as error:
            error.add_note(f"f(1), which the others are compared with, failed{label}")
            raise
        if whole is None:
            raise ValueError(f"fn: expected a result to compare, got None in a group of one{label}; return it")
        for size in wanted:
            try:
                parts = _whole(runner(body, size, **options).results, combine)
            except CollectiveError as error:
                made += 1
                failures.append(f"  size {size}{label}: {type(error).__name__}: {error}")
                continue
            for rank, part in enumerate(parts):
                made += 1
                text = _near(whole, part, rtol, atol) if rtol or atol else difference(whole, part)
                if text is not None:
                    who = "" if combine is not None else f", rank {rank}"
                    failures.append(f"  size {size}{label}{who}: {text}")
                    break
    if not made:
        raise AssertionError("nothing was compared: sizes or cases is empty")
    if failures:
        headline = f"f(G) differs from f(1) in {len(failures)} runs:"
        others = [text.splitlines()[0].rstrip(":") for text in failures[1:12]]  # one bug, told in full once
        rest = [f"  ... and {len(failures) - 12} more"] if len(failures) > 12 else []
        raise AssertionError("\n".join([headline, failures[0], *others, *rest]))
    return made


def _whole(results: list[Any], combine: Callable[[list[Any]], Any] | None) -> list[Any]:
    return results if combine is None else [combine(results)]


def _near(expected: Any, got: Any, rtol: float, atol: float) -> str | None:
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def expect_collectives(
    trace: Trace | Run,
    expected: Mapping[str, int] | Sequence[str],
    *,
    max_bytes: int | None = None,
    rank: int | None = None,
) -> None:
    """Every rank made exactly these collectives.

    Args:
        trace: the trace, or the run that has it.
        expected: counts per kind in any order (`{"all_gather_single": 1}`, `{}` for none at all), or the kinds in
            order. Old spellings (`all_gather_into_tensor`) count as the new ones.
        max_bytes: most bytes one rank may send.
        rank: check this rank alone.

    Raises:
        AssertionError: names the ranks, shows expected and made, and the lanes; also if no rank has run.
    """
    __tracebackhide__ = True
    if isinstance(trace, Run):
        trace = trace.trace
    wanted: Any
    if isinstance(expected, Mapping):
        wanted = {}
        for kind, count in expected.items():
            wanted[canonical_kind(kind)] = wanted.get(canonical_kind(kind), 0) + count
        wanted = {kind: count for kind, count in wanted.items() if count}
    else:
        wanted = [canonical_kind(kind) for kind in expected]
    problems = []
    if trace.size == 0:
        problems.append("  no rank has run: an empty trace proves nothing")
    for one in range(trace.size) if rank is None else [rank]:
        made: Any = [canonical_kind(call.kind) for call in trace.of_rank(one)]
        if isinstance(wanted, dict):
            made = {kind: made.count(kind) for kind in sorted(set(made))}
        if made != wanted:
            problems.append(f"  rank {one}: expected {wanted}, made {made}")
        sent = trace.total_bytes(one)
        if max_bytes is not None and sent > max_bytes:
            problems.append(f"  rank {one}: sent {sent} bytes, expected at most {max_bytes}")
    if problems:
        raise AssertionError("\n".join(["unexpected collectives:", *problems, trace.lanes()]))


def with_layout(tree: Any, layout: str) -> Any:
    """The same values in another memory layout: every tensor of a nest of lists, tuples and dicts is laid out anew.

    Args:
        tree: a tensor, or lists, tuples and dicts of them; other values are passed through.
        layout: "transposed" (dims reversed in memory), "strided" (every second element of a buffer whose gaps are
            poisoned with NaN or the largest integer), "offset" (contiguous, but not at the start of its storage).

    Returns:
        The same nest; leaves keep shape, dtype, device and requires_grad. Tensors of one element or less that have
        only one layout keep it.

    Raises:
        ValueError: unknown layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}, expected one of {LAYOUTS}")
    if isinstance(tree, torch.Tensor):
        return _laid_out(tree, layout)
    if isinstance(tree, Mapping):
        return {key: with_layout(value, layout) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(with_layout(value, layout) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(with_layout(value, layout) for value in tree)
    return tree


def layouts(tree: Any) -> Iterator[tuple[str, Any]]:
    """Each layout's name with the tree laid out that way: `for name, x in layouts(x): ...`."""
    for layout in LAYOUTS:
        yield layout, with_layout(tree, layout)


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    source = tensor.detach()
    if layout == "transposed" and source.dim() > 1:
        dims = tuple(reversed(range(source.dim())))
        made = source.permute(dims).contiguous().permute(dims)
    elif layout == "offset":
        buffer = _poisoned(source, (source.numel() + 3,))
        made = buffer[3:].view(source.shape)
        made.copy_(source)
    else:
        buffer = _poisoned(source, (*source.shape, 2))
        made = buffer[..., 0]
        made.copy_(source)
    return made.requires_grad_(tensor.requires_grad)


def _poisoned(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    buffer = torch.empty(shape, dtype=like.dtype, device=like.device)
    if like.is_floating_point() or like.is_complex():
        return buffer.fill_(float("nan"))
    return buffer.fill_(True if like.dtype is torch.bool else torch.iinfo(like.dtype).max)
