"""What a shared library asks of the system it is loaded into."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from elftools.elf.dynamic import DynamicSection, DynamicTag
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection


@dataclass(frozen=True)
class Library:
    """Facts of one shared library.

    Attributes:
        needed: Names of the libraries it loads.
        undefined: Symbols that others must define, with the name of the library and version they
            are bound to, or "" for those bound to none.
        stripped: Whether it carries no symbol table but the dynamic one.
        rpaths: Search paths for libraries that it carries.
        fatbin: Its GPU code, as nvcc laid it out.
    """

    needed: tuple[str, ...]
    undefined: dict[str, str] = field(repr=False)
    stripped: bool
    rpaths: tuple[str, ...]
    fatbin: bytes = field(repr=False)


def read(data: bytes) -> Library:
    """Reads a shared library.

    Args:
        data: The whole file.

    Returns:
        What it asks for.
    """
    elf = ELFFile(io.BytesIO(data))
    dynamic = [s for s in elf.iter_sections() if isinstance(s, DynamicSection)]
    tags = [tag for section in dynamic for tag in section.iter_tags()]
    fatbin = elf.get_section_by_name(".nv_fatbin")
    return Library(
        needed=_strings(tags, DT_NEEDED="needed"),
        undefined=_undefined(elf),
        stripped=elf.get_section_by_name(".symtab") is None,
        rpaths=_strings(tags, DT_RPATH="rpath", DT_RUNPATH="runpath"),
        fatbin=fatbin.data() if fatbin else b"",
    )


def _strings(tags: list[DynamicTag], **attributes: str) -> tuple[str, ...]:
    # pyelftools hangs a tag's text on it under a name that depends on the tag.
    kinds = [(tag, str(tag.entry.d_tag)) for tag in tags]
    return tuple(str(getattr(tag, attributes[kind])) for tag, kind in kinds if kind in attributes)


def _undefined(elf: ELFFile) -> dict[str, str]:
    symbols = elf.get_section_by_name(".dynsym")
    if not isinstance(symbols, SymbolTableSection):
        return {}
    versions = {}  # version index -> where it comes from
    numbers = None
    for section in elf.iter_sections():
        if isinstance(section, GNUVerNeedSection):
            for need, entries in section.iter_versions():
                for entry in entries:
                    versions[entry["vna_other"]] = f"{need.name}:{entry.name}"
        elif isinstance(section, GNUVerSymSection):
            numbers = section
    found = {}
    for index, symbol in enumerate(symbols.iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or not symbol.name:
            continue
        number = numbers.get_symbol(index)["ndx"] if numbers is not None else 0
        weak = "weak" if symbol["st_info"]["bind"] == "STB_WEAK" else ""
        found[symbol.name] = versions.get(number, weak)
    return found
