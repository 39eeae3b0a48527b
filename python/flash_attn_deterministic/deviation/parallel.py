"""Work in several processes that ends at once when it is interrupted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

import torch

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def each(
    function: Callable[..., _Result], items: Sequence[_Item], jobs: int, *rest: Any
) -> Iterator[tuple[_Item, _Result]]:
    """Yields (item, function(item, *rest)) as they are done.

    Args:
        function: importable by its name.
        items: what to call it with.
        jobs: processes, each with one thread of torch; 1: this process.
        rest: further arguments of every call.

    Raises:
        Exception: what a call raised; the others are stopped.
    """
    if jobs < 2 or len(items) < 2:
        for item in items:
            yield item, function(item, *rest)
        return
    # Not a fork: torch's threads of this process don't survive one.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(items)), context, _start) as pool:
        futures = {pool.submit(function, item, *rest): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _start() -> None:
    # Ctrl-C goes to every process of a terminal; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
