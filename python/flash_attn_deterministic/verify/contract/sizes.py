"""How large the cases of the contract checks are, by device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...checks.tensors import LATENT
from ..features import CAUSAL, OF_CONTRACT, options_of

Config = tuple[int, str]

# Head dim and dtype: every kernel of the release wheel, and head dims that are padded.
_CONFIGS: tuple[Config, ...] = (
    (64, "bf16"),
    (64, "fp16"),
    (128, "bf16"),
    (128, "fp16"),
    (32, "bf16"),
    (32, "fp16"),
    (40, "bf16"),
    (72, "fp16"),
    (96, "bf16"),
    (96, "fp16"),
    (112, "bf16"),
    (192, "bf16"),
    (192, "fp16"),
    (256, "bf16"),
    (256, "fp16"),
)


_LATENT: tuple[Config, ...] = ((LATENT[0], "bf16"), (LATENT[0], "fp16"))


@dataclass(frozen=True)
class Size:
    """What cases are drawn from."""

    device: str  # "cpu" or "cuda"
    configs: tuple[Config, ...]  # head dims with dtypes
    latent: tuple[Config, ...]  # the same of multi-head latent attention
    features: tuple[str, ...]  # names in features.FEATURES
    window_shrink: int  # windows are divided by it
    splits: tuple[int, ...]  # split sizes; the last is the default mode's on a GPU
    split: int  # the split size of checks that take one
    # of keys: below, at and above the boundaries of blocks and splits, rising
    lengths: tuple[int, ...]
    seqlen: int  # of checks that need one longer sequence; the last of `lengths` is not above it
    seqlen_q: tuple[int, ...]  # of queries: one, and enough for several blocks of rows
    batches: tuple[int, ...]  # batch sizes
    repeats: int  # how often run-to-run repeats a call
    page_sizes: tuple[int, ...]  # tokens per page
    nheads: int  # query heads, of which two groups share keys
    backward_lengths: tuple[tuple[int, int], ...]  # (seqlen_q, seqlen_k)
    long_backward: int  # a length at which many thread blocks add to one row of dq; 0: none

    @property
    def causal_features(self) -> tuple[str, ...]:
        """Features in which no row sees a key after its own."""
        return tuple(name for name in self.features if name in CAUSAL)

    def options(self, feature: str) -> dict[str, Any]:
        """Returns a feature's options, `alibi` among them."""
        return options_of(feature, self.window_shrink)


def size_of(device: str, quick: bool, held: Callable[[Config], bool] = lambda _: True) -> Size:
    """Returns the size of a run on a device whose wheel holds some configs."""
    configs, latent = (tuple(filter(held, some)) for some in (_CONFIGS, _LATENT))
    features = OF_CONTRACT
    if device == "cpu":
        return Size(
            device=device,
            configs=((64, "bf16"), (72, "fp16")) if quick else configs,
            latent=latent[:1] if quick else latent,
            features=("full", "causal", "window", "everything-causal") if quick else features,
            window_shrink=6,
            splits=(64, 128),
            split=64,
            lengths=(1, 63, 64, 65, 129, 193),
            seqlen=200,
            seqlen_q=(1, 70),
            batches=(1, 2, 9),
            repeats=2,
            page_sizes=(16, 48),
            nheads=4,
            backward_lengths=((70, 70), (33, 100)),
            long_backward=0,
        )
    small = ("full", "causal", "window", "softcap", "alibi", "everything-causal", "sink")
    return Size(
        device=device,
        configs=configs[:5] if quick else configs,
        latent=latent[:1] if quick else latent,
        features=small if quick else features,
        window_shrink=1,
        splits=(64, 512, 2048),
        split=512,
        lengths=(1, 63, 64, 65, 127, 129, 511, 512, 513, 1100, 2047, 2048, 2049, 4097, 4100),
        seqlen=4100,
        seqlen_q=(1, 130),
        batches=(1, 2, 3, 64, 200),
        repeats=20,
        page_sizes=(16, 48, 256),
        nheads=8,
        backward_lengths=((130, 130), (200, 513), (513, 200))
        if quick
        else ((1, 65), (130, 130), (200, 513), (513, 200), (1025, 1025)),
        long_backward=4096,
    )
