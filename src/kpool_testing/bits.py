"""Tensors as bits: equality that tells NaN payloads and signed zeros apart, the first difference, and poison."""

from __future__ import annotations

import torch


def has_data(tensor: torch.Tensor) -> bool:
    """False for tensors without values: meta tensors, and fake tensors of any device."""
    return not tensor.is_meta and tensor.untyped_storage().device.type != "meta"


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order, uint8 [numel, itemsize]."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), tensor.element_size())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """True if shape, dtype and every bit agree; tensors without values are compared by shape and dtype alone."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if not (has_data(left) and has_data(right)):
        return has_data(left) == has_data(right)
    return first_difference(left, right) is None


def first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    """Index of the first element, in row-major order, whose bits differ; None if there is none.

    Both tensors have the same shape and dtype; they may lie on different devices.
    """
    if left.numel() == 0:
        return None
    a, b = raw(left), raw(right)
    if a.device != b.device:
        a, b = a.cpu(), b.cpu()
    if torch.equal(a, b):
        return None
    position = int((a != b).any(dim=1).nonzero()[0])
    index: list[int] = []
    for extent in reversed(left.shape):
        index.append(position % extent)
        position //= extent
    return tuple(reversed(index))


# Infinity in each dtype, as an integer of its size: one more is a signalling NaN.
_INFINITY: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def poison(tensor: torch.Tensor, rank: int) -> None:
    """Fill a tensor with what spoils whatever reads it, another on every rank: NaN, a huge integer, True.

    A NaN carries the rank in its payload, which sums and products in fp32 and fp64 keep, so that results computed from
    it are not bit-identical over ranks even where all of them are NaN. It is a signalling one: arithmetic in place
    leaves other bits.
    """
    with torch.no_grad():
        target = values(tensor.detach())
        if target.is_complex():
            target = torch.view_as_real(target)
        if target.dtype is torch.bool:
            target.fill_(True)
        elif not target.is_floating_point():
            target.fill_(torch.iinfo(target.dtype).max - rank % 64)
        elif target.dtype in _INFINITY:
            whole, infinity = _INFINITY[target.dtype]
            target.view(whole).fill_(infinity + 1 + rank % 32)  # bfloat16 has six bits for the rank
        else:
            target.fill_(float("nan"))


def is_poison(tensor: torch.Tensor, rank: int) -> bool:
    """Whether a tensor still holds what `poison` put there for this rank."""
    expected = torch.empty_like(values(tensor.detach()), memory_format=torch.contiguous_format)
    poison(expected, rank)
    return same_bits(values(tensor), expected)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """The stored elements of a sparse tensor; a dense one as it is."""
    return tensor._values() if tensor.is_sparse else tensor


def own_nan(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """A copy of a real tensor in which every NaN is the rank's own poison."""
    spoiled = torch.empty_like(tensor)
    poison(spoiled, rank)
    return torch.where(tensor.isnan(), spoiled, tensor)
