"""Holds a library to the symbol versions of manylinux_2_28: run on _C.so when it is linked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from elftools.elf.elffile import ELFFile

from ..errors import RefusedError, exit_status

_ARCHITECTURES = {"EM_X86_64": Architecture.x86_64, "EM_AARCH64": Architecture.aarch64}


def too_new(path: Path) -> Iterator[str]:
    """Names what a library imports and manylinux_2_28 does not have: symbol, version, library."""
    with path.open("rb") as file:
        elf: Any = ELFFile(file)
        policies = WheelPolicies(libc=Libc.GLIBC, arch=_ARCHITECTURES[elf["e_machine"]])
        policy = policies.get_policy_by_name(f"manylinux_2_28_{policies.architecture.value}")
        names = dict[int, list[str]]()  # of symbols, by the index of their version
        indices = elf.get_section_by_name(".gnu.version")
        for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            names.setdefault(indices.get_symbol(index)["ndx"], []).append(symbol.name)
        for needed, versions in elf.get_section_by_name(".gnu.version_r").iter_versions():
            for version in versions:
                prefix, _, number = version.name.partition("_")
                if number not in policy.symbol_versions.get(prefix, (number,)):
                    symbols = names.get(version["vna_other"], ["no symbol"])
                    yield from (f"{each} ({version.name} of {needed.name})" for each in symbols)


def main() -> int:
    """Refuses the library that the command line names; returns the exit status."""

    def check() -> None:
        if found := sorted(too_new(Path(sys.argv[1]))):
            raise RefusedError(
                f"{sys.argv[1]}: imports what manylinux_2_28 does not have: {', '.join(found)}. "
                "The headers of a newer C or C++ library bring it in: see docs/adr/0004."
            )

    return exit_status(check)


if __name__ == "__main__":
    sys.exit(main())
