from __future__ import annotations

import pytest
import torch
from flash_attn_deterministic.bench.compare import compare


def rows() -> torch.Tensor:
    """As under a causal mask: first rows of large numbers, then many of small ones."""
    out = torch.randn(1, 512, 2, 64, generator=torch.Generator().manual_seed(0))
    return out / torch.arange(1, 513).sqrt()[:, None, None]


def test_roundings_are_no_difference() -> None:
    compare((rows().bfloat16(), rows()), (rows().half(), rows()))


@pytest.mark.parametrize("place", [0, 1])
def test_any_of_the_results_may_differ(place: int) -> None:
    changed = [rows(), rows()]
    changed[place] = 2 * rows()
    with pytest.raises(ValueError, match="the result differs from ours by"):
        compare(changed, [rows(), rows()])


def test_another_mask_in_the_later_rows() -> None:
    """Its largest difference is small beside the numbers of the first rows."""
    changed = rows()
    changed[:, 256:] *= 1.2
    assert (changed - rows()).abs().max() < 0.05 * rows().abs().max()
    with pytest.raises(ValueError, match="differs from ours"):
        compare([changed], [rows()])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_differs(value: float) -> None:
    changed = rows()
    changed[0, 3, 0, 0] = value
    with pytest.raises(ValueError, match="differs from ours"):
        compare([changed], [rows()])


def test_another_shape() -> None:
    with pytest.raises(ValueError, match=r"has shape \[\(1, 512, 64, 2\)\], ours has"):
        compare([rows().transpose(2, 3)], [rows()])
