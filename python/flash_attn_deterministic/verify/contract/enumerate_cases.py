"""Cases of a check: the product of what it varies."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Iterator

from .check import Case
from .sizes import Size

_SHORT = {"seqlen_q": "q", "seqlen_k": "k", "split_size": "split", "page_size": "page"}


def cases_of(size: Size, features: Iterable[str], **axes: Iterable[int]) -> Iterator[Case]:
    """Yields a case for each config, feature and choice of parameters.

    Args:
        size: of the run.
        features: names in features.FEATURES.
        **axes: values of each parameter.
    """
    choices = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    for (head_dim, dtype), feature, choice in itertools.product(
        size.configs, tuple(features), choices
    ):
        yield case_of(head_dim, dtype, feature, choice)


def feature_cases(size: Size) -> Iterator[Case]:
    """Yields a case for each config, feature and number of queries."""
    return cases_of(size, size.features, seqlen_q=size.seqlen_q)


def case_of(head_dim: int, dtype: str, feature: str, parameters: dict[str, int]) -> Case:
    """Returns a case whose seed follows from its name."""
    words = [f"d{head_dim}", dtype, feature]
    words += [f"{_SHORT.get(name, name)}{value}" for name, value in parameters.items()]
    name = "-".join(words)
    return Case(name, head_dim, dtype, feature, zlib.crc32(name.encode()) >> 1, parameters)
