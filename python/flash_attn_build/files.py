"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Writes a text file; nobody ever sees half of it.

    Args:
        path: The file. Its folder is made if need be.
        text: The whole content.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)  # mkstemp's 0600 would keep other users out
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, indented, in the order of the value's keys.

    Args:
        path: The file.
        value: What json can write.
    """
    write_text(path, json.dumps(value, indent=2) + "\n")
