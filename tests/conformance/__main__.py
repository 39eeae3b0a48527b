"""Runs upstream's tests on this machine's GPU: `nox -s conformance [-- --seconds S --seed N]`."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flash_attn_deterministic import as_flash_attn
from flash_attn_deterministic.verify.shared.commands import sigterm_interrupts

from tests import conftest as _finds_flash_attn_build  # noqa: F401

from .differences import FILE, load
from .plugin import Conformance

# Of the source distribution: the tests, and the rotary embedding in Triton that they compare with.
_FILES = (
    "tests/test_flash_attn.py", "flash_attn/layers/__init__.py", "flash_attn/layers/rotary.py",
    "flash_attn/ops/__init__.py", "flash_attn/ops/triton/__init__.py",
    "flash_attn/ops/triton/rotary.py",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        Exit status: 0 every failure is listed; 1 another failure, or nothing passed; 2 wrong usage;
        130 after Ctrl-C or SIGTERM, with the results so far.
    """
    arguments = _parser().parse_args(argv)
    if arguments.file is None and not torch.cuda.is_available():
        print("error: upstream's tests need a CUDA device; torch finds none", file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    differences = load(arguments.differences)
    plugin = Conformance(seed, arguments.cases_per_test, arguments.seconds, differences)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        upstream = None if arguments.file is not None else _unpack(tree)
        with as_flash_attn():
            _add_to_flash_attn(tree / "flash_attn")
            with sigterm_interrupts():
                complete = _run(arguments.file or tree / _FILES[0], tree, plugin)
    record = {
        "complete": complete,
        "seed": seed,
        "seconds": round(time.monotonic() - begin, 1),
        "upstream": upstream,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "possible": plugin.possible,
        "outcomes": dict(plugin.outcomes),
        "by_test": {test: dict(counts) for test, counts in sorted(plugin.by_test.items())},
        "listed": dict(plugin.listed),
        "helpers": {helper.name: helper.reason for helper in differences.helpers},
        "failed": plugin.failed,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _print(record)
    if not complete:
        print("interrupted", file=sys.stderr)
        return 130
    return int(bool(plugin.failed) or not plugin.outcomes["passed"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240, help="no case starts after (240)")
    parser.add_argument("--seed", type=int, help="draws the same cases again (default: any)")
    parser.add_argument(
        "--cases-per-test", type=int, default=2000, help="drawn of each test function (2000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    parser.add_argument(
        "--file", type=Path, metavar="FILE", help="a test file to run instead of upstream's"
    )
    parser.add_argument(
        "--differences", type=Path, metavar="FILE", default=FILE, help="listed differences"
    )
    return parser


def _unpack(tree: Path) -> dict[str, str]:
    """Puts upstream's files into a folder; returns what they are of."""
    from flash_attn_build.upstream import source
    from flash_attn_build.upstream.pin import load_pin

    pin = load_pin()
    archive = source.find_archive(pin, os.environ)
    root = f"{pin.name.replace('-', '_')}-{pin.version}"
    with tarfile.open(archive) as tar:
        for name in _FILES:
            file = tar.extractfile(f"{root}/{name}")
            assert file is not None
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read())
    return {"name": pin.name, "version": pin.version, "sha256": pin.sha256}


def _add_to_flash_attn(folder: Path) -> None:
    """Lets `flash_attn.layers` be found in upstream's folder; what the alias holds stays ours."""
    sys.modules["flash_attn"].__path__.append(str(folder))


def _run(file: Path, folder: Path, plugin: Conformance) -> bool:
    """Returns whether it came to an end of its own."""
    # Upstream's tests know nothing of the strict settings in pyproject.toml.
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    options = ["-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-p", "no:warnings"]
    words = [str(file), "-c", str(settings), "--rootdir", str(folder), *options]
    interrupted = pytest.main(words, [plugin]) == pytest.ExitCode.INTERRUPTED
    return plugin.stopped or not interrupted


def _print(record: dict[str, Any]) -> None:
    for test, counts in record["by_test"].items():
        print(f"{test:<40}", ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    for reason, number in record["listed"].items():
        print(f"{number} listed: {reason}")
    for name, reason in record["helpers"].items():
        print(f"without {name}: {reason}")
    for failure in record["failed"][:20]:
        print(f"FAILED {failure['case']}\n       {failure['message'].splitlines()[0][:300]}")
    outcomes = record["outcomes"]
    total = sum(outcomes.values())
    print(
        f"seed {record['seed']}: {total} of {record['possible']} cases in {record['seconds']} s: "
        + ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    )


if __name__ == "__main__":
    sys.exit(main())
