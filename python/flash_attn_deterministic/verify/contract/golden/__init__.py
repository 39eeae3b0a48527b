"""Results that must not change from one wheel to the next: the row "golden" of the contract.

The bits of a call are a function of the source of the kernels, which `bits_version` counts, and of
the compute capability. Hashes of a fixed set of calls are committed for the present version, and
this check compares a wheel's results with them.
`python -m flash_attn_deterministic.verify.contract.golden` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....build_info import build_info
from ....checks.tensors import LATENT
from ..call import Attention
from ..check import Case, Mismatch, expect_numbers
from ..sizes import Size
from . import record
from .calls import CALLS


def golden_cases(size: Size) -> Iterator[Case]:
    """Yields each call at each head dim and dtype that it is for."""
    for head_dim, dtype in (*size.configs, *size.latent):
        for number, call in enumerate(CALLS):
            if call.latent != (head_dim == LATENT[0]):
                continue
            name = f"d{head_dim}-{dtype}-{call.name}"
            yield Case(name, head_dim, dtype, call.feature, 0, {"call": number})


def unavailable(size: Size) -> str:
    """Returns why a run has no golden hashes to compare with; "" if it has."""
    version, capability = build_info().bits_version, compute_capability(size.device)
    if known_entry(capability) is not None:
        return ""
    if capability == "cpu":
        return "the reference adds with torch's own operations, whose bits may change with it"
    return (
        f"no golden hashes are known for bits_version {version} on compute capability {capability}"
    )


def known_entry(capability: str) -> record.Entry | None:
    """Returns what is known for the installed wheel on a compute capability."""
    return record.read(build_info().bits_version).entries.get(capability)


def compute_capability(device: str) -> str:
    """Returns e.g. "9.0", of the first GPU; "cpu" on the CPU, which has no golden hashes."""
    if device == "cpu":
        return device
    major, minor = torch.cuda.get_device_capability(0)
    return f"{major}.{minor}"


def golden(case: Case, attention: Attention, size: Size) -> None:
    """Compares the hashes of a call's inputs and results with the file's.

    Raises:
        Mismatch: they differ, or the file has none for this case.
    """
    known = record.read(build_info().bits_version)
    entry = known.entries.get(compute_capability(size.device))
    call = CALLS[case["call"]]
    drawn, inputs = call.inputs((case.head_dim, case.dtype), attention, size.device)
    if known.inputs.get(case.name) != inputs:
        raise Mismatch(f"{case.name}: the inputs are not those that were hashed", drawn)
    expected = "" if entry is None else entry.hashes.get(case.name, "")
    if entry is None or not expected:
        raise Mismatch(f"{case.name}: there is no golden hash of this case", drawn)
    if why := known.problem(entry):
        raise Mismatch(f"golden hashes are not accepted: {why}", drawn)
    _, results = call.run(drawn)
    expect_numbers(drawn, case.name, results)
    found = record.hashes_of(results)
    if found != expected:
        pairs = zip(results, found.split(), expected.split(), strict=True)
        name, own, other = next(pair for pair in pairs if pair[1] != pair[2])
        raise Mismatch(f"{name}: the hash of its bits is {own}, expected {other}", drawn, name)
