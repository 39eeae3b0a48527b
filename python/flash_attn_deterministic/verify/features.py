"""Features of the API, one line each: contract, accuracy, tests on GPUs and drawn calls share them.

`alibi` stands for slopes that are drawn, `sink` for sinks, `seeds` for a seed of dropout for each
sequence, `residual` for a mode that keeps a residual. The windows are for long sequences; on the
CPU they are cut down as the lengths are.
"""

from __future__ import annotations

from typing import Any

FEATURES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (100, 33)},
    "window-left": {"window_size": (150, -1)},
    "window-right": {"window_size": (-1, 40)},
    "window-right-0": {"window_size": (700, 0)},
    "softcap": {"causal": True, "softcap": 3.0},
    "alibi": {"causal": True, "alibi": True},
    "everything": {"window_size": (600, 20), "softcap": 4.0, "alibi": True},
    "everything-causal": {"causal": True, "window_size": (600, -1), "softcap": 4.0, "alibi": True},
    "sink": {"window_size": (127, 0), "sink": True},
    "scale": {"softmax_scale": 0.3},
    "window-0": {"window_size": (0, 0)},
    "window-left-0": {"window_size": (0, -1)},
    "softcap-full": {"softcap": 0.5},
    "alibi-full": {"alibi": True},
    "sink-full": {"softcap": 4.0, "alibi": True, "sink": True},
    "sink-dropout": {"dropout_p": 0.2, "causal": True, "sink": True},
    "dropout": {"dropout_p": 0.2},
    "dropout-causal": {"dropout_p": 0.4, "causal": True, "alibi": True},
    "dropout-window": {"dropout_p": 0.3, "window_size": (200, 20), "alibi": True},
    "dropout-softcap": {"dropout_p": 0.3, "window_size": (600, 20), "softcap": 4.0, "alibi": True},
    "dropout-seeds": {"dropout_p": 0.3, "causal": True, "seeds": True},
    "residual": {"residual": True},
}
# Those whose bits a row of the contract compares; dropout has a row of its own.
OF_CONTRACT = tuple(FEATURES)[:11]
# Those in which no row sees a key after its own.
CAUSAL = frozenset(
    name
    for name, options in FEATURES.items()
    if options.get("causal") or options.get("window_size", (-1, -1))[1] == 0
)


def options_of(feature: str, shrink: int = 1) -> dict[str, Any]:
    """Returns a feature's options; windows are divided by `shrink`."""
    options = dict(FEATURES[feature])
    if "window_size" in options:
        options["window_size"] = tuple(
            side if side <= 0 else max(1, side // shrink) for side in options["window_size"]
        )
    return options
