"""The release policy: what a wheel has to show before it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SettingError

PATH = Path(__file__).resolve().parent / "policy.json"
_SCHEMA = 2


@dataclass(frozen=True)
class Unverified:
    """An architecture whose machine code no GPU at hand could run.

    Attributes:
        reason: Why; it stands in the release notes.
        ptx: The PTX that was run instead, by a driver that passes over machine code, such as
            "compute_80"; "" if the policy does not ask for that.
        ptx_report: The report of that run, relative to the source tree.
    """

    reason: str
    ptx: str = ""
    ptx_report: str = ""


@dataclass(frozen=True)
class Policy:
    """The release policy.

    Attributes:
        required_architectures: GPU architectures, such as "sm_90", whose machine code must have
            passed, and words one of which the name of such a GPU holds.
        unverified_architectures: Those that a wheel may hold without.
        required_sections: Sections that a report must have passed.
        required_checks: Rows of the section "contract" that it must have passed.
        wheels: The wheels of a release: local version ("" for the one of the package index) to the
            version of nvcc that makes it.
    """

    required_architectures: Mapping[str, tuple[str, ...]]
    unverified_architectures: Mapping[str, Unverified]
    required_sections: tuple[str, ...]
    required_checks: tuple[str, ...]
    wheels: Mapping[str, str]


def load_policy(path: Path = PATH) -> Policy:
    """Reads the release policy.

    Args:
        path: The file.

    Returns:
        The policy.

    Raises:
        SettingError: The file is missing, or is not a policy of this form.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["schema"] != _SCHEMA:
            raise SettingError(f"{path}: expected schema {_SCHEMA}, got {record['schema']!r}")
        policy = Policy(
            required_architectures={
                name: tuple(each["gpus"]) for name, each in record["required_architectures"].items()
            },
            unverified_architectures={
                name: Unverified(**each)
                for name, each in record["unverified_architectures"].items()
            },
            required_sections=tuple(record["required_sections"]),
            required_checks=tuple(record["required_checks"]),
            wheels={str(label): str(cuda) for label, cuda in record["wheels"].items()},
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{path}: not a release policy ({type(error).__name__}: {error})"
        ) from error
    both = {*policy.required_architectures} & {*policy.unverified_architectures}
    if both:
        raise SettingError(
            f"{path}: both required and allowed unverified: {', '.join(sorted(both))}"
        )
    demanded = (policy.required_architectures, policy.required_sections, policy.required_checks)
    if not all((*demanded, *policy.required_architectures.values())):
        raise SettingError(f"{path}: a policy that requires nothing lets everything through")
    if "" not in policy.wheels:
        raise SettingError(f"{path}: wheels: expected one without a local version")
    return policy
