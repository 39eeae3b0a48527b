"""What pip, `build` and cibuildwheel call (PEP 517): the wheel that `nox -s build` makes."""

from __future__ import annotations

import shlex
import signal

from scikit_build_core.build import (  # noqa: F401
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
)

from .compile.build import build, request_from
from .errors import BuildError


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, str | list[str]] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds, repairs and checks the wheel, its manifest beside it; returns its name.

    The setting `args` holds words of `nox -s build --`, such as "--preset dev". The metadata are
    complete only after the repair, so `metadata_directory` is not used.
    """
    settings = dict(config_settings or {})
    words = settings.pop("args", "")
    if settings:
        raise BuildError(
            f"config settings: expected args=WORDS of `nox -s build --` alone, got {settings}"
        )
    words = shlex.split(words if isinstance(words, str) else " ".join(words))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the compilers would go on
    return build(request_from([*words, "--out-dir", wheel_directory])).name
