"""Numbers that are the same with every torch, on every machine.

They are made on the CPU by integer arithmetic that neither overflows nor rounds, and not by a
random number generator, whose stream a torch release may change.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import zlib
from collections.abc import Iterable, Sequence

import torch

_WORD = 0xFFFF_FFFF
_POOL = 1_000_003  # a prime, so that no row length divides it
_DIGITS = 16  # of a hash: 64 bits of sha256 guard against chance, not against forgery


def draw(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Returns roughly normal numbers of mean 0 and standard deviation 1.15; other names, others."""
    pool, size = _pool(), math.prod(shape)
    offset = zlib.crc32(name.encode()) % _POOL
    copies = -(-(offset + size) // _POOL)
    return pool.repeat(copies)[offset : offset + size].reshape(*shape).to(dtype)


@functools.cache
def _pool() -> torch.Tensor:
    """Returns the numbers that tensors are cut from: (_POOL,), fp32, all of them exact."""
    index = torch.arange(_POOL, dtype=torch.int64)
    words = [_mixed(2 * index + part) for part in range(2)]
    # Four numbers of 16 bits add up to one of nearly normal distribution.
    total = sum(((word >> 16) + (word & 0xFFFF) for word in words), torch.zeros_like(index))
    return (total - 2 * 0xFFFF).to(torch.float32) * 2.0**-15


def _mixed(word: torch.Tensor) -> torch.Tensor:
    """Mixes the bits of words of 32 bits, held as int64; no product reaches 2^63.

    Shifts and factors: those of the "low bias" integer hashes found by C. Wellons' hash-prospector.
    """
    word = (word + 0x9E37_79B9) & _WORD
    word = ((word ^ (word >> 15)) * 0x2C1B_3C6D) & _WORD
    word = ((word ^ (word >> 12)) * 0x297A_2D39) & _WORD
    return word ^ (word >> 15)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Returns hexadecimal digits over the dtypes, shapes and bytes of tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode())
        here = tensor.detach().cpu().contiguous()
        found.update(ctypes.string_at(here.data_ptr(), here.nbytes))  # needs no NumPy
    return found.hexdigest()[:_DIGITS]
