"""Writing to disk so that nothing half-written stays, and disk errors say what to do."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flash_attn_build.upstream.errors import DiskFullError, NotWritableError

_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextmanager
def disk_errors(path: Path, advice: str) -> Iterator[None]:
    """Turn an OSError of the block into an error that says what to do.

    Args:
        path: What is being written; named in the message.
        advice: What the user can do if the place is not writable.

    Raises:
        DiskFullError: No space, or no quota, is left.
        NotWritableError: Any other failure.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in _FULL:
            raise DiskFullError(
                f"{path}: the disk is full ({reason}); free some space or {advice}"
            ) from error
        raise NotWritableError(f"{path}: cannot be written ({reason}); {advice}") from error


@contextmanager
def replacing(target: Path) -> Iterator[tuple[int, Path]]:
    """Yield a temporary file beside `target`; it takes target's place if the block succeeds.

    Args:
        target: The file to create or replace.

    Returns:
        File descriptor (closed by the caller) and path of the temporary file.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    temporary = Path(name)
    try:
        yield handle, temporary
        # mkstemp's 0600 would lock others out of a shared cache or checkout.
        temporary.chmod(0o644)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
