"""Reports of wheels with a planted fault, made on a GPU: verify failed them at the right row.

split-boundary: few-rows kernels end each split one block of keys late (`limit_to_split`).
dq-atomics: the plan of the backward never takes turns. Both are of the dev preset, so that sections
that want other head dims end with errors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flash_attn_deterministic.verify.report import canonical_digest
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[3]
FAULTS = ROOT / "tests" / "data" / "faults"
# Name of the file to the row that must have failed.
ROWS = {"split-boundary": "schedule", "dq-atomics": "backward"}


@pytest.mark.parametrize("name", ROWS)
def test_the_fault_was_caught(name: str) -> None:
    path = FAULTS / f"{name}.json"
    record: dict[str, Any] = json.loads(path.read_text())
    schema = json.loads((ROOT / "docs" / "verification.schema.json").read_text())
    assert not list(Draft202012Validator(schema).iter_errors(record))
    assert record["digest"] == canonical_digest(record)
    assert (record["complete"], record["status"], record["device"]) == (True, "failed", "cuda")
    checks = {c["id"]: c for c in record["sections"][1]["data"]["checks"]}
    caught = checks[ROWS[name]]
    assert caught["status"] == "failed"
    assert caught["counter_example"]["left"] != caught["counter_example"]["right"] or (
        "expected other bits" in caught["counter_example"]["what"]
    )


def test_only_gradients_suffer_from_atomics_in_dq() -> None:
    path = FAULTS / "dq-atomics.json"
    record: dict[str, Any] = json.loads(path.read_text())
    checks = {c["id"]: c for c in record["sections"][1]["data"]["checks"]}
    assert checks["backward"]["counter_example"]["tensor"] == "dq"
    forward = set(checks) - {"backward", "dropout", "golden"}  # those that look at gradients
    assert {checks[name]["status"] for name in forward} == {"passed"}
