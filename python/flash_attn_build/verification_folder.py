"""Gives each verification of a wheel a folder of its own, so that none takes another's place.

A failed report says something of the wheel for good: a second run that passes must not erase it.
`python -m flash_attn_build.verification_folder DIR` makes the next folder and prints its path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import StepError


def make(folder: Path) -> Path:
    """Makes the folder of the next run.

    Args:
        folder: Where the runs of a wheel lie.

    Returns:
        `<folder>/1`, or one more than the highest number that is there; new and empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        names = [path.name for path in folder.iterdir()]
        number = max((int(name) for name in names if name.isdecimal()), default=0) + 1
        try:
            (folder / str(number)).mkdir()
        except FileExistsError:  # another run was faster
            continue
        return folder / str(number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Makes the folder of the next run and prints it.

    Args:
        arguments: Words of the command line; those of the process if None.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    try:
        print(make(parser.parse_args(arguments).folder))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return StepError.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
