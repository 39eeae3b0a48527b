"""The release policy: what a wheel has to show before it is published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import SettingError

PATH = Path(__file__).resolve().parents[1] / "release_policy.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit that wheels are released for.

    Attributes:
        series: Such as "13.0".
        label: Names its folder in the index and its files on the release page, such as "cu130".
        cibuildwheel: Identifier in cibuildwheel's configuration that stands for its image.
    """

    series: str
    label: str
    cibuildwheel: str


@dataclass(frozen=True)
class Unverified:
    """An architecture whose machine code nobody could run.

    Attributes:
        reason: Why; it stands in the release notes.
        ptx: The PTX that was run in its stead, by a driver that passes over machine code, such as
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
            passed on such a GPU.
        unverified_architectures: Those that a wheel may hold without.
        required_sections: Sections that a report must have passed.
        required_checks: Rows of the section "contract" that it must have passed.
        toolkits: By series. Each has a wheel in the index and on the release page.
        package_index: The series whose wheel goes to the package index: there is room for one,
            since all wheels of a version have one name.
    """

    required_architectures: tuple[str, ...]
    unverified_architectures: Mapping[str, Unverified]
    required_sections: tuple[str, ...]
    required_checks: tuple[str, ...]
    toolkits: Mapping[str, Toolkit]
    package_index: str

    def toolkit_of(self, version: str) -> Toolkit | None:
        """Finds the toolkit that a version belongs to.

        Args:
            version: Full version, such as "13.0.88".

        Returns:
            The toolkit, or None if the policy has none of its series.
        """
        return self.toolkits.get(".".join(version.split(".")[:2]))


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
            required_architectures=tuple(record["required_architectures"]),
            unverified_architectures={
                name: Unverified(each["reason"], each.get("ptx", ""), each.get("ptx_report", ""))
                for name, each in record["unverified_architectures"].items()
            },
            required_sections=tuple(record["required_sections"]),
            required_checks=tuple(record["required_checks"]),
            toolkits={
                series: Toolkit(series, each["label"], each["cibuildwheel"])
                for series, each in record["toolkits"].items()
            },
            package_index=record["package_index"],
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise SettingError(
            f"{path}: not a release policy ({type(error).__name__}: {error})"
        ) from error
    both = set(policy.required_architectures) & set(policy.unverified_architectures)
    if both:
        raise SettingError(
            f"{path}: both required and allowed unverified: {', '.join(sorted(both))}"
        )
    if not all((policy.required_architectures, policy.required_sections, policy.required_checks)):
        raise SettingError(f"{path}: a policy that requires nothing lets everything through")
    if policy.package_index not in policy.toolkits:
        raise SettingError(
            f"{path}: package_index: expected one of toolkits, got {policy.package_index!r}"
        )
    return policy
