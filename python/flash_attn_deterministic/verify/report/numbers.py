"""Numbers of a report in words; one that JSON does not have (NaN, Inf) is None in a report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

NOT_FINITE = "not finite"


def ratio(value: float | None) -> str:
    """Returns e.g. "1.05x"."""
    return NOT_FINITE if value is None else f"{value:.2f}x"


def size(count: float | None) -> str:
    """Returns bytes as MB."""
    return NOT_FINITE if count is None else f"{count / 1e6:.1f} MB"


def error(value: float | None) -> str:
    """Returns e.g. "1.2e-03"."""
    return NOT_FINITE if value is None else f"{value:.1e}"


def short(value: float | None) -> str:
    """Returns three digits, e.g. "3.36"."""
    return NOT_FINITE if value is None else f"{value:.3g}"


def milliseconds(time: Mapping[str, float | None]) -> str:
    """Returns e.g. "3.36 (3.34 to 3.70)": median, 10th and 90th percentile."""
    return f"{short(time['median'])} ({short(time['p10'])} to {short(time['p90'])})"


def height(value: float | None) -> float:
    """Returns what to order by: None is above all."""
    return float("inf") if value is None else float(value)


def worst(values: Iterable[float | None]) -> float | None:
    """Returns the highest of at least one value, None if there is a None among them."""
    return max(values, key=height)
