from __future__ import annotations

import pytest
from flash_attn_deterministic.architectures import runs_on


@pytest.mark.parametrize(("architecture", "capability", "expected"), [
    pytest.param("80-real", (8, 0), True, id="cubin-own"),
    pytest.param("80-real", (8, 9), True, id="cubin-later-minor"),
    pytest.param("80-real", (7, 5), False, id="cubin-before"),
    pytest.param("86-real", (8, 0), False, id="cubin-earlier-minor"),
    pytest.param("80-real", (9, 0), False, id="cubin-later-major"),
    pytest.param("90-real", (8, 9), False, id="cubin-earlier-major"),
    pytest.param("90-virtual", (9, 0), True, id="ptx-own"),
    pytest.param("90-virtual", (12, 0), True, id="ptx-later-major"),
    pytest.param("90-virtual", (8, 9), False, id="ptx-earlier"),
    pytest.param("80", (8, 6), True, id="both-as-cubin"),
    pytest.param("80", (10, 0), True, id="both-as-ptx"),
    pytest.param("120-real", (12, 1), True, id="three-digits"),
    pytest.param("90a-real", (9, 0), True, id="letter-own"),
    pytest.param("100a-virtual", (10, 3), False, id="letter-other"),
])  # fmt: skip
def test_runs_on(architecture: str, capability: tuple[int, int], expected: bool) -> None:
    assert runs_on(architecture, capability) is expected


@pytest.mark.parametrize("architecture", ["", "native", "90-ptx", "sm_90", "9"])
def test_unknown_form_is_refused(architecture: str) -> None:
    with pytest.raises(ValueError, match="architecture: expected"):
        runs_on(architecture, (9, 0))
