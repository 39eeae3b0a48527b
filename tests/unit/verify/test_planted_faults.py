"""Each planted fault of a feature is caught by accuracy's live check, in every case that has it."""

from __future__ import annotations

import pytest
from flash_attn_deterministic.verify.features import FEATURES

from tests.planted_faults import FAULTS, Fault, caught


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault) -> None:
    for config in fault.configs:
        found = caught(fault, config, "cpu")
        assert found
        assert [name for name, ok in found.items() if not ok] == []


def test_every_feature_has_a_fault_of_its_own() -> None:
    met = {feature for fault in FAULTS for feature in fault.features}
    assert met == FEATURES.keys()
