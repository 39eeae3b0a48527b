from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flash_attn_build.errors import RefusedError
from flash_attn_build.release import kernels_hub
from kernels._rust import Digest, DigestAlgorithm, Metadata
from release_samples import Project

VARIANT = "torch-stable-abi210-cu130-x86_64-linux"
LOAD = """
import sys
from pathlib import Path
import kernels.variants
import torch
from kernels.backends import CUDA
from packaging.version import Version

# torch for CPUs would ask for a CPU variant; the rest is as on a machine with a GPU.
kernels.variants._select_backend = lambda backend: CUDA(Version("13.2"))
package = kernels.get_local_kernel(Path(sys.argv[1]))
assert Path(package.__file__).parent == Path(sys.argv[1], sys.argv[2])
q = torch.linspace(-1, 1, 2 * 9 * 2 * 64).view(2, 9, 2, 64).to(torch.bfloat16)
out = package.flash_attn_func(q, q, q, causal=True)
print(out.view(torch.int16).sum().item())
"""


def test_files_and_hashes_are_those_the_hub_library_reads(project: Project, tmp_path: Path) -> None:
    wheel = project.wheel
    folder = kernels_hub.write(wheel, tmp_path / "hub")
    assert folder == tmp_path / "hub" / "build" / VARIANT
    with zipfile.ZipFile(wheel) as archive:
        library = archive.read("flash_attn_deterministic/_C.so")
    assert (folder / "_C.so").read_bytes() == library
    assert (folder / "__init__.py").exists()
    assert (folder / "licenses" / "LICENSE").exists()
    assert not list(folder.rglob("METADATA"))

    metadata = Metadata.read_from_file(folder / "metadata.json")
    names = ("flash_attn_deterministic", "flash-attn-deterministic")
    assert (metadata.id, str(metadata.name)) == names
    assert (metadata.version, metadata.license, metadata.python_depends) == (0, "bsd-3-clause", [])
    assert metadata.backend.archs == ["8.0", "9.0", "9.0a", "8.0+PTX"]
    assert metadata.digest is not None
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_architectures_are_written_as_the_hub_does() -> None:
    given = ["80-real", "90a-real", "120f-real", "80-virtual", "100"]
    assert kernels_hub.archs(given) == ["8.0", "9.0a", "12.0f", "8.0+PTX", "10.0+PTX"]


def test_two_files_in_one_place_are_refused(project: Project, tmp_path: Path) -> None:
    with zipfile.ZipFile(project.wheel, "a") as archive:
        archive.writestr("flash_attn_deterministic/licenses/LICENSE", "another")
    with pytest.raises(RefusedError, match="two files would be licenses/LICENSE"):
        kernels_hub.write(project.wheel, tmp_path / "hub")


@pytest.mark.build
def test_the_hub_library_loads_the_layout_and_its_bits_are_the_wheels(tmp_path: Path) -> None:
    import flash_attn_deterministic as package
    import torch

    folder = kernels_hub.write(Path(os.environ["FLASH_ATTN_WHEEL"]), tmp_path)
    command = [sys.executable, "-c", LOAD, str(tmp_path), str(folder.relative_to(tmp_path))]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    q = torch.linspace(-1, 1, 2 * 9 * 2 * 64).view(2, 9, 2, 64).to(torch.bfloat16)
    expected = package.flash_attn_func(q, q, q, causal=True)
    assert int(found.stdout) == expected.view(torch.int16).sum().item()
