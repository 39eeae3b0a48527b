"""Environment variables that have a say in what compilers make, besides the source tree."""

from __future__ import annotations

from collections.abc import Mapping

_PREFIXES = ("CMAKE_", "NVCC_", "SKBUILD_", "ZIG_")
_NAMES = frozenset(
    {
        "CCC_OVERRIDE_OPTIONS",  # clang's, which zig is
        "CFLAGS",
        "COMPILER_PATH",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CUDAFLAGS",
        "CUDAHOSTCXX",
        "CXXFLAGS",
        "C_INCLUDE_PATH",
        "GCC_EXEC_PREFIX",
        "LDFLAGS",
        "LIBRARY_PATH",
    }
)
# How fast and how loud a build is.
_HARMLESS = frozenset(
    {
        "CMAKE_BUILD_PARALLEL_LEVEL",
        "CMAKE_COLOR_DIAGNOSTICS",
        "CMAKE_EXPORT_COMPILE_COMMANDS",
    }
)


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """Picks the variables that can change a wheel and that neither sources nor options tell of.

    CUDACXX, CXX and the like are not among them: the manifest has the compilers' versions.

    Args:
        environ: The environment of a build.

    Returns:
        Those that are set to something, in the order of names.
    """
    return {
        name: value
        for name, value in sorted(environ.items())
        if value.strip()
        and name not in _HARMLESS
        and (name in _NAMES or name.startswith(_PREFIXES))
    }
