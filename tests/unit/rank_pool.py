"""Ranks for tests: processes on this machine that run functions together over gloo."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = 120.0


class RankFailed(Exception):
    """A function raised on some ranks; the text has what each raised."""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _serve(
    pipe: Connection, path: list[str], rank: int, size: int, port: int, timeout: float
) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            break
        if task is None:
            break
        module, name, args = task
        try:
            result = True, getattr(importlib.import_module(module), name)(*args)
        except Exception as error:
            result = False, (type(error).__name__, str(error), traceback.format_exc())
        pipe.send(result)
    # Without the group's shutdown, which would wait for ranks that have ended.
    os._exit(0)


class Pool:
    """Ranks 0 to size - 1, one process each.

    Args:
        size: how many.
        timeout: of the process group, in seconds.
    """

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        port = _free_port()
        self._pipes = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, sys.path, rank, size, port, timeout), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts a module's function on every rank, with the same arguments."""
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))

    def results(self, ranks: Sequence[int] | None = None) -> list[tuple[bool, Any]]:
        """Returns for each rank whether it came to an end, and what it returned or raised."""
        found = []
        for rank in range(self.size) if ranks is None else ranks:
            assert self._pipes[rank].poll(TIMEOUT), f"rank {rank} does not answer"
            found.append(self._pipes[rank].recv())
        return found

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Runs a module's function on every rank, and returns what each returns."""
        self.start(function, *args)
        found = self.results()
        if not all(good for good, _ in found):
            bad = [f"rank {r}:\n{text[2]}" for r, (good, text) in enumerate(found) if not good]
            raise RankFailed("\n".join(bad))
        return [result for _, result in found]

    def stop(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


@contextlib.contextmanager
def pool_of(size: int, timeout: float = TIMEOUT) -> Iterator[Pool]:
    """Yields a pool, and stops it."""
    pool = Pool(size, timeout)
    try:
        yield pool
    finally:
        pool.stop()
