"""Linear layers and RMS norms whose rows have the same bits in any batch.

A row of a matrix product is a sum over its features. Libraries choose the order of that sum by the
number of rows. Here each output element is one chain of additions over the features, first to last,
whatever the tile: tiles of 16 rows serve decode, tiles of 128 rows serve prefill and training. A
norm has one program for each row. Gradients use torch's products: they repeat, but may depend on
the batch.

On the CPU the layers run over blocks of a fixed number of rows instead: simple and slow.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch's CPU builds come without it
    triton = None

ROWS = 64  # of a block on the CPU


def make_invariant(model: torch.nn.Module, device: str) -> None:
    """Replaces every linear layer and every RMS norm of a model, in place; weights are shared.

    Layers without matrices stay as they are. So do LayerNorms, which were not examined.

    Raises:
        ValueError: a norm is not computed as Llama's, or a module that would not be replaced has a
            matrix, such as a layer of experts.
        RuntimeError: CUDA without Triton.
    """
    for name, module in model.named_modules():
        _check(name, module)
    if device == "cuda" and triton is None:
        raise RuntimeError("device: expected a torch with Triton for CUDA, found none")
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            linear = isinstance(child, torch.nn.Linear)
            if not linear and not type(child).__name__.endswith("RMSNorm"):
                continue
            if device == "cuda":
                setattr(parent, name, Linear(child) if linear else Norm(child))
            else:
                setattr(parent, name, InBlocks(child))


@torch.no_grad()
def _check(name: str, module: Any) -> None:
    kind = type(module).__name__
    if kind.endswith("RMSNorm"):
        eps, similar = getattr(module, "variance_epsilon", None), False
        if eps is not None:
            x = torch.linspace(-1, 1, module.weight.shape[0]).to(module.weight)[None]
            normal = x.float() * torch.rsqrt(x.float().pow(2).mean() + eps)
            expected = module.weight * normal.to(x.dtype)
            similar = torch.allclose(module(x), expected, rtol=0.02, atol=0.0)
        if not similar:
            raise ValueError(f"{name}: expected x / rms(x) * weight, as Llama's norm, got a {kind}")
    if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
        return
    for part, parameter in module.named_parameters(recurse=False):
        if parameter.dim() > 1:
            raise ValueError(
                f"{name}.{part}: expected matrices in torch.nn.Linear and Embedding alone, got one "
                f"in a {kind}, which cannot be replaced"
            )


class InBlocks(torch.nn.Module):
    """Runs a layer that treats rows alike on blocks of `ROWS` rows, padded with zeros."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns (..., features)."""
        rows = hidden.flatten(0, -2)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % ROWS))
        # Copies: every block is contiguous and aligned alike.
        blocks = [self.module(block.clone()) for block in torch.split(padded, ROWS)]
        return torch.cat(blocks)[: rows.shape[0]].view(*hidden.shape[:-1], -1)


class Linear(torch.nn.Module):
    """x W^T, rounded, plus the bias if there is one."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight, self.bias = module.weight, module.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes (..., in_features), returns (..., out_features)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        product: torch.Tensor = _LinearFunction.apply(rows, self.weight)
        product = product.view(*hidden.shape[:-1], -1)
        return product if self.bias is None else product + self.bias


class Norm(torch.nn.Module):
    """x / rms(x) * weight, rounded before the weight as in transformers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = float(module.variance_epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Takes and returns (..., features)."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        norm: torch.Tensor = _NormFunction.apply(rows, self.weight, self.eps)
        return norm.view(hidden.shape)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        (dy,) = gradients
        return dy @ weight, dy.t() @ x


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        y = torch.empty_like(x)
        size = triton.next_power_of_2(x.shape[1])
        _norm[(x.shape[0],)](x, weight, y, x.shape[1], eps, size, num_warps=4)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        dy, wide = gradients[0].float(), x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + ctx.eps)
        normal, dn = wide * scale, dy * weight.float()
        dx = scale * (dn - normal * (dn * normal).mean(-1, keepdim=True))
        return dx.to(x.dtype), (dy * normal).sum(0).to(weight.dtype), None


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns x W^T for x (rows, in_features) and weight (out_features, in_features)."""
    rows, features = x.shape
    y = x.new_empty(rows, weight.shape[0])
    # The tile's size decides speed alone: each element adds its features 16 at a time, in order.
    few = rows <= 16
    tile_m, tile_n, tile_k = (16, 16, 256) if few else (128, 128, 64)
    grid = (triton.cdiv(rows, tile_m) * triton.cdiv(weight.shape[0], tile_n),)
    _product[grid](
        x, weight, y, rows, weight.shape[0], features, x.stride(0), weight.stride(0),
        tile_m, tile_n, tile_k, num_warps=2 if few else 8, num_stages=3,
    )  # fmt: skip
    return y


if triton is not None:

    @triton.jit
    def _product(
        x, weight, y, rows, columns, features, x_stride, weight_stride,
        TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    ):  # fmt: skip
        # Tiles in columns of 8: their operands stay in the L2 cache.
        program, tiles_m = tl.program_id(0), tl.cdiv(rows, TILE_M)
        tiles_n = tl.cdiv(columns, TILE_N)
        first = program // (8 * tiles_n) * 8
        height = min(tiles_m - first, 8)
        row = (first + program % (8 * tiles_n) % height) * TILE_M + tl.arange(0, TILE_M)
        column = program % (8 * tiles_n) // height * TILE_N + tl.arange(0, TILE_N)
        k = tl.arange(0, TILE_K)
        left = x + row[:, None].to(tl.int64) * x_stride + k[None, :]
        right = weight + column[None, :].to(tl.int64) * weight_stride + k[:, None]
        sums = tl.zeros((TILE_M, TILE_N), tl.float32)
        for start in range(0, features, TILE_K):
            within = k < features - start
            a = tl.load(left, (row < rows)[:, None] & within[None, :], 0.0)
            b = tl.load(right, (column < columns)[None, :] & within[:, None], 0.0)
            sums = tl.dot(a, b, sums)
            left += TILE_K
            right += TILE_K
        out = y + row[:, None].to(tl.int64) * columns + column[None, :]
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(out, sums.to(y.dtype.element_ty), inside)

    @triton.jit
    def _norm(x, weight, y, features, eps, SIZE: tl.constexpr):
        row, column = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
        inside = column < features
        wide = tl.load(x + row * features + column, inside, 0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / features + eps)
        normal = (wide * scale).to(y.dtype.element_ty)
        tl.store(y + row * features + column, normal * tl.load(weight + column, inside), inside)
