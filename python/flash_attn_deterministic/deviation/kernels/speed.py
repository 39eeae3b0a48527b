"""Time of a training step of the text-to-image transformer, by attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..training.text_to_image import Drawings, Size
from .plan import KernelPlan


def speed(plan: KernelPlan) -> list[dict[str, Any]]:
    """Times each attention; `speedup` is against explicit attention in the format."""
    sizes = {"tiny": Size(16, 4, 32, 2, 2, 2)}
    if not plan.small:
        sizes = {
            "1030 tokens, head_dim 64": Size(128, 4, 768, 12, 12, 8),
            "4102 tokens, head_dim 64": Size(256, 4, 768, 12, 12, 2),
        }
    points: list[dict[str, Any]] = []
    for label, size in sizes.items():
        attentions = plan.attentions(torch.bfloat16, size.width // size.heads, backward=True)
        for name, attention in attentions.items():
            if name in ("sdpa-math", "ours-atomics"):
                continue
            torch.manual_seed(0)
            workload = Drawings(size)
            model = workload.model(attention).to(plan.device)
            optimizer = workload.optimizer(model)

            def step(model: Any = model, optimizer: Any = optimizer, load: Any = workload) -> None:
                generator = torch.Generator().manual_seed(0)
                with torch.autocast(plan.device, dtype=torch.bfloat16):
                    loss = load.loss(model, load.batch(generator))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

            times = _times(step, plan.device, warm=3, count=3 if plan.small else 10)
            points.append(
                {"backend": name, "model": label, "milliseconds": statistics.median(times),
                 "all": times}
            )  # fmt: skip
    for point in points:
        slow = [p for p in points if p["model"] == point["model"] and p["backend"] == "explicit"]
        if slow:
            point["speedup"] = slow[0]["milliseconds"] / point["milliseconds"] - 1
    return points


def _times(step: Callable[[], None], device: str, warm: int, count: int) -> list[float]:
    times = []
    for number in range(warm + count):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= warm:
            times.append((time.perf_counter() - start) * 1000)
    return times
