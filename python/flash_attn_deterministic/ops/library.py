"""Registers the ops of torch.ops.flash_attn_deterministic, when imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .. import schemas
from . import autograd, cpu, cuda, meta, vmap

_library: Any = torch.library.Library(schemas.NAMESPACE, "DEF")  # type: ignore[no-untyped-call, unused-ignore]
schemas.define(_library)
cpu.register(_library)
meta.register(_library)
autograd.register(_library)
vmap.register(_library)

kernels_missing = cuda.load(Path(__file__).parents[1].joinpath("_C.so"))
cuda.register_missing(_library, kernels_missing)
