from __future__ import annotations

import pytest
from flash_attn_build.compile import variables


@pytest.mark.parametrize(
    "name",
    [
        "CMAKE_ARGS", "CMAKE_CUDA_FLAGS", "SKBUILD_CMAKE_DEFINE", "CFLAGS", "CXXFLAGS", "CUDAFLAGS",
        "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN", "CUDAHOSTCXX", "CPATH",
        "ZIG_LIB_DIR",
    ],
)  # fmt: skip
def test_what_changes_a_wheel_is_told(name: str) -> None:
    assert variables.given({name: "-x", "HOME": "/h"}) == {name: "-x"}
    assert variables.given({name: " "}) == {}


@pytest.mark.parametrize(
    "name",
    ["PATH", "CXX", "CUDACXX", "MAX_JOBS", "SOURCE_DATE_EPOCH", "CMAKE_BUILD_PARALLEL_LEVEL"],
)
def test_what_does_not_is_passed_over(name: str) -> None:
    assert variables.given({name: "x"}) == {}
