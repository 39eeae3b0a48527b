"""A model of transformers cut over two ranks by its own plan: each head has one process's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flash_attn_deterministic as package
import pytest
import torch
from bits import bits_equal
from rank_pool import pool_of
from small_models import NAME, make_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.distributed")

RANKS = 2
attention_func: Any = package.flash_attn_func


def run_model(folder: str, ranks: int) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
    """Returns q, k, v and out of each layer on this rank, and the logits; a rank calls it."""
    from flash_attn_deterministic.integrations import transformers as integration
    from transformers.distributed import DistributedConfig

    called: Any = integration._FUNCTIONS[0]  # transformers keeps it
    cell = called.__closure__[called.__code__.co_freevars.index("function")]
    recorded: list[list[torch.Tensor]] = []
    plain = cell.cell_contents

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kw: Any) -> Any:
        out = plain(q, k, v, *args, **kw)
        recorded.append([t.detach().clone() for t in (q, k, v, out)])
        return out

    options: dict[str, Any] = {"attn_implementation": NAME, "dtype": torch.bfloat16}
    if ranks > 1:
        options["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=ranks)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, **options).eval()
    ids = torch.arange(3, 43)[None] % 97
    cell.cell_contents = attend
    try:
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
    finally:
        cell.cell_contents = plain
    return recorded, logits


def test_heads_of_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(make_config("Llama")).to(torch.bfloat16).save_pretrained(tmp_path)
    with pool_of(RANKS) as pool:
        found = pool.run(run_model, str(tmp_path), RANKS)
    (first, logits), (second, same_logits) = found
    alone, expected = run_model(str(tmp_path), 1)
    assert len(first) == len(second) == len(alone) == 2
    for parts, whole in zip(zip(first, second, strict=True), alone, strict=True):
        q, k, v, out = (torch.cat(heads, dim=2) for heads in zip(*parts, strict=True))
        assert parts[0][0].shape[2] == 2
        assert q.shape == whole[0].shape
        assert bits_equal(attention_func(q, k, v, causal=True), out)
    assert bits_equal(logits, same_logits)
    torch.testing.assert_close(logits, expected, atol=0.02, rtol=0.05)
