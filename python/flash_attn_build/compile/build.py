"""Builds the wheel: compile, repair, check, describe. dist/ changes only if all of it succeeds."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import BuildError, exit_status
from ..wheel import sbom
from ..wheel.check import check
from ..wheel.repair import repair
from . import build_folder, debian_cuda, jobs, manifest, toolchain

# Dates the files of a wheel that is built outside a git checkout.
FIXED_EPOCH = "1764547200"
# Up to what Ninja and CMake go on with.
_ERROR = re.compile(
    r"^(FAILED: |CMake Error|error: ).*?(?=^(\[\d+ of |ninja: |-- |\*\*\* )|\Z)", re.M | re.S
)
# Before two large units have ended, Ninja does not know how many run at once. (On two cores it was
# 63 % off at 02:59 of 25:55, from 03:12 on at most 16 %.)
_EARLY = re.compile(r"(?<=, 0[0-2]:\d\d), about [^]]+ left")
_BACKEND = (
    "import json, os, sys; from scikit_build_core.build import build_wheel; "
    "os.chdir(sys.argv[1]); build_wheel(sys.argv[2], json.loads(sys.argv[3]))"
)
# nvcc hands paths to a shell, partly without quotes.
NVCC_PATH = re.compile(r"[\w./+@-]+")


@dataclass(frozen=True)
class Request:
    """What to build: the options of the command line, with whole paths."""

    preset: str
    out_dir: Path
    build_dir: Path
    defines: tuple[str, ...] = ()
    arch: str = platform.machine()
    local: str = ""
    locked: bool = False
    cuda: str = ""


def build(request: Request) -> Path:
    """Builds one wheel into the request's out_dir, its manifest beside it; returns its path.

    Raises:
        BuildError: A step failed. The out_dir is as it was.
    """
    environ: Mapping[str, str] = os.environ
    if request.cuda:
        nvcc = debian_cuda.assemble(debian_cuda.fetch(), request.build_dir / "cuda12")
        environ = {"CUDACXX": str(nvcc)}
    elif request.locked or request.arch != platform.machine():
        environ = {}  # whatever nvcc the machine has, that of packages
    cuda, host = toolchain.find(environ, arch=request.arch), toolchain.host_compiler(request.arch)
    job_count, influences = jobs.count(), build_folder.influences(os.environ)
    tools = manifest.tool_versions(cuda.version, host)
    # What objects are made of: compilers and headers.
    names = ("nvcc", toolchain.compiler_name(host), "torch")
    made_of = {n: v for n, v in tools.items() if n in names or n.startswith("nvidia-")}
    _say(f"preset {request.preset}, CUDA {cuda.version} ({cuda.root}), {job_count} at once")
    build_folder.drop_stale_state(request.build_dir, {"tools": made_of, "environment": influences})
    request.out_dir.mkdir(parents=True, exist_ok=True)
    begin, epoch = time.time(), source_date_epoch(os.environ)
    # Beside its final place, so that the last step is a rename.
    with tempfile.TemporaryDirectory(dir=request.out_dir, prefix=".build-") as folder:
        environ = {
            "CMAKE_BUILD_PARALLEL_LEVEL": str(job_count),
            "NINJA_STATUS": "[%f of %t, %w, about %W left] ",
            **os.environ,
            "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",  # says which objects are of this configuration
            "CUDACXX": str(cuda.nvcc),
            "SOURCE_DATE_EPOCH": epoch,
            "TMPDIR": folder,  # where compilers that are killed leave their files
        }
        made = _compile(request, Path(folder, "made"), environ)
        components = sbom.find_components(cuda)
        wheel = repair(made, Path(folder, "repaired"), components, int(epoch), request.local)
        info = check(wheel)
        units = build_folder.read_units(request.build_dir)
        ended = [(request.build_dir / unit["output"]).stat().st_mtime for unit in units]
        settings = {
            "preset": request.preset,
            "defines": list(request.defines),
            "environment": influences,
            "machine": manifest.machine(os.environ),
            "source_date_epoch": int(epoch),
            "locked": request.locked,
            "toolkit_sha256": toolchain.toolkit_sha256(cuda),
            "jobs": job_count,
            "wall_seconds": round(time.time() - begin, 1),
            # Fewer than all if the build folder held objects of an earlier run.
            "compiled_in_this_run": sum(end >= begin for end in ended),
        }
        places = {
            str(request.build_dir): "build", str(files.ROOT): ".", str(cuda.root): "<cuda>",
            sys.prefix: "<environment>",
        }  # fmt: skip
        used = resource.getrusage(resource.RUSAGE_CHILDREN)  # with their children
        cost = {
            "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
            "peak_rss_bytes": used.ru_maxrss * 1024,
        }
        text = manifest.describe(wheel, info, units, settings, tools, places, cost)
        files.write_json(manifest.path_of(wheel), text)
        final = request.out_dir / wheel.name
        # Between the two a manifest of other bytes may lie there, which every reader refuses.
        os.replace(wheel, final)
        os.replace(manifest.path_of(wheel), manifest.path_of(final))
    _say(
        f"{final} ({final.stat().st_size / 1e6:.1f} MB, sha256 {text['wheel']['sha256']}); "
        f"{len(units)} translation units, {cost['cpu_seconds'] / 60:.1f} CPU-minutes, "
        f"largest process {cost['peak_rss_bytes'] / jobs.GIB:.2f} GiB"
    )
    return final


def source_date_epoch(environ: Mapping[str, str], root: Path = files.ROOT) -> str:
    """Dates the files of a wheel: SOURCE_DATE_EPOCH, or the last commit, in seconds since 1970."""
    given = environ.get("SOURCE_DATE_EPOCH", "").strip()
    if not given and (root / ".git").exists():
        command = ["git", "-C", str(root), "log", "-1", "--format=%ct"]
        with suppress(OSError):  # no git
            log = subprocess.run(command, capture_output=True, text=True, check=False)
            given = log.stdout.strip()  # nothing before the first commit
    if not re.fullmatch("[0-9]*", given):
        raise BuildError(
            f"SOURCE_DATE_EPOCH: expected seconds since 1970, a whole number, got {given!r}. "
            "Unset it to take the date of the last commit."
        )
    return given or FIXED_EPOCH


def _compile(request: Request, destination: Path, environ: Mapping[str, str]) -> Path:
    options = [f"--preset={request.preset}"]
    if request.arch != platform.machine():
        options.append(f"--toolchain=cmake/{request.arch}.cmake")
        environ = {**environ, "_PYTHON_HOST_PLATFORM": f"linux-{request.arch}"}
    settings = {"build-dir": str(request.build_dir), "cmake.args": ";".join(options)}
    # The linker has stripped the library; each machine's `strip` would lay it out in its own way.
    settings["install.strip"] = "false"
    settings |= {f"cmake.define.{k}": v for k, _, v in (d.partition("=") for d in request.defines)}
    command = [sys.executable, "-c", _BACKEND, str(files.ROOT), str(destination)]
    status, said = run_group([*command, json.dumps(settings)], environ)
    made = list(destination.glob("*.whl"))
    if status or len(made) != 1:
        error = first_error(said)
        if re.search("Killed|signal 9", error):
            error += f"\nMemory ran out: set MAX_JOBS below {environ['CMAKE_BUILD_PARALLEL_LEVEL']}"
        raise BuildError(f"the build failed (exit status {status}):\n{error}")
    return made[0]


def run_group(command: Sequence[str], environ: Mapping[str, str]) -> tuple[int, str]:
    """Runs a command and shows what it prints; interrupted, ends its children too (compilers).

    Returns:
        Exit status, and what it printed.
    """
    with subprocess.Popen(
        command, env=dict(environ), start_new_session=True, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    ) as child:  # fmt: skip
        said = ""
        try:
            for line in child.stdout or ():
                print(_EARLY.sub("", line), end="", flush=True)
                said += line
            return child.wait(), said
        except BaseException:
            with suppress(ProcessLookupError):  # it ended by itself just now
                os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise


def first_error(said: str) -> str:
    """Picks the first error out of what CMake and Ninja printed, without the compiler's command.

    Compilers that run when one fails still end, and theirs would be the last words.
    """
    if found := _ERROR.search(said):
        said = re.sub(r"\A(FAILED: .*\n).*\n", r"\1", found[0])
    shown = said.splitlines()
    return "\n".join(shown[:40] if found else shown[-20:]).rstrip()


def _say(text: str) -> None:
    print(f"build: {text}", flush=True)


def request_from(arguments: Sequence[str], root: Path = files.ROOT) -> Request:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="nox -s build --", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("--preset", default="release", help="of CMakePresets.json (%(default)s)")
    add("--out-dir", type=Path, help="for the wheel (dist for release, dist/PRESET for others)")
    add("--build-dir", type=Path, help="for objects, which stay (build/PRESET)")
    add("-D", dest="defines", action="append", default=[], metavar="NAME=VALUE",
        help="a CMake cache entry, such as -D FLASH_ATTENTION_HEAD_DIMS=64;128")  # fmt: skip
    add("--local", default="", metavar="LABEL", help="local version: cu130 makes 0.1.0+cu130")
    add("--arch", choices=toolchain.TARGETS, default=platform.machine(),
        help="machine that the wheel is for (this one); another: with Debian's cross compiler"
    )  # fmt: skip
    # Also read by the nox session, which installs what compiles before this module runs.
    add("--locked", action="store_true", help="tools of locks/ only, by hash")
    add("--cuda", choices=["12"], default="", help="with Debian's CUDA 12 toolkit")
    given = parser.parse_args(arguments)
    name = given.preset if given.arch == platform.machine() else f"{given.preset}-{given.arch}"
    # A small wheel has the name of the full one, and must not replace it.
    dist = root / "dist" if name == "release" else root / "dist" / name
    given.out_dir = (given.out_dir or dist).resolve()
    given.build_dir = (given.build_dir or root / "build" / name).resolve()
    given.defines, given.local = tuple(given.defines), given.local.lower()
    for define in given.defines:
        if "=" not in define:
            parser.error(f"-D: expected NAME=VALUE, got {define!r}")
    if not NVCC_PATH.fullmatch(str(given.build_dir)):
        parser.error(
            f"nvcc does not compile in {str(given.build_dir)!r}: --build-dir takes a path of "
            "letters, digits and . _ - + @ only"
        )
    if given.local and not (given.local.isascii() and given.local.isalnum()):
        parser.error(f"--local: expected letters and digits, got {given.local!r}")
    return Request(**vars(given))


def main() -> int:
    """Builds what the command line asks for; returns the exit status."""
    request = request_from(sys.argv[1:])
    return exit_status(lambda: build(request), "Nothing was put into the folder for wheels.")


if __name__ == "__main__":
    sys.exit(main())
