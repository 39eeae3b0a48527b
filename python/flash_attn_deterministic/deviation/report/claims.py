"""Every claim of the paper, how it is tested, and the verdict that the data gives.

Nothing here is typed in but claims and thresholds: numbers and verdicts come from the studies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .forward_plots import Points, inputs_of, presets_of, ratios, title
from .kernels import CONTROL
from .plots import median
from .training_plots import mean_over_matrices, without_start

REPRODUCED = "reproduced"
CONDITIONAL = "reproduced only under stated conditions"
NOT_REPRODUCED = "not reproduced"
NOT_TESTED = "not tested"

# Thresholds of the verdicts.
TENFOLD = (5.0, 20.0)  # "roughly an order of magnitude", as a ratio of medians
MORE = 1.1  # a ratio of medians from which one is said to be more than the other
GROWTH = 1.5  # largest over smallest length, from which a deviation is said to grow
FALL = 0.8  # largest over smallest block, under which a deviation is said to fall
MINOR = 0.1  # share of the whole deviation under which a step is minor
SPEEDUP = 0.14  # of a training step
AGREEMENT = 0.99  # share of elements within 1 ULP,
EQUAL = 0.95  # and of those that are equal
BIAS_SIGMAS = 5.0  # standard errors from which a mean is not 0,
BIAS_ULP = 0.05  # and its size from which it is called a bias
LOWER = (2.0, 5.0)  # "2-5 times less significant than low-precision training"


@dataclass(frozen=True)
class Outcome:
    """What the data says of a claim."""

    verdict: str
    numbers: list[str] = field(default_factory=list)
    condition: str = ""


@dataclass(frozen=True)
class Evidence:
    """Results of the studies, as their read functions return them; None: not run."""

    forward: dict[str, Points] | None = None
    kernels: dict[str, Any] | None = None
    training: dict[str, Any] | None = None


@dataclass(frozen=True)
class Claim:
    """A claim.

    Args:
        key: short name.
        source: where it is made.
        text: the claim, in our words.
        how: how it is tested.
        judge: Evidence -> Outcome.
        figures: names of the plots that show it.
    """

    key: str
    source: str
    text: str
    how: str
    judge: Callable[[Evidence], Outcome]
    figures: tuple[str, ...] = ()


def judge_all(evidence: Evidence) -> list[tuple[Claim, Outcome]]:
    """Judges every claim."""
    return [(claim, claim.judge(evidence)) for claim in CLAIMS]


def _untested(what: str) -> Outcome:
    return Outcome(NOT_TESTED, [], f"the study of {what} was not run")


def decide(cases: Sequence[tuple[str, bool, str]]) -> Outcome:
    """Turns cases (name, whether the claim holds, number) into an outcome.

    All hold: reproduced. Some: reproduced under the conditions that are their names. None: not.
    """
    if not cases:
        return Outcome(NOT_TESTED, [], "the studies hold no data on it")
    numbers = [
        f"{name}: {number}{'' if holds else ' (does not hold)'}" for name, holds, number in cases
    ]
    held = [name for name, holds, _ in cases if holds]
    if len(held) == len(cases):
        return Outcome(REPRODUCED, numbers)
    if not held:
        return Outcome(NOT_REPRODUCED, numbers)
    return Outcome(CONDITIONAL, numbers, "holds with " + "; ".join(held))


def _figure(evidence: Evidence, name: str) -> Points | None:
    return None if evidence.forward is None else evidence.forward.get(name)


def _groups(points: Points) -> list[tuple[str, Points]]:
    """Cells by preset and inputs."""
    return [
        (
            f"preset {preset}, {title(inputs)}",
            [(c, r) for c, r in points if (c.preset, c.inputs) == (preset, inputs)],
        )
        for preset in presets_of(points)
        for inputs in inputs_of(points)
        if any((c.preset, c.inputs) == (preset, inputs) for c, _ in points)
    ]


def _median_of(result: Any, pair: str, metric: str = "max") -> float:
    value = median(result[pair][metric])
    return float("nan") if value is None else value


def _formats(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "3")
    if points is None:
        return _untested("the forward pass")
    cases = []
    for name, group in _groups(points):
        named = {
            cell.format: _median_of(result, "difference")
            for cell, result in group
            if cell.format in ("bf16", "fp16", "fp32", "fp64")
        }
        order = [named[f] for f in ("bf16", "fp16", "fp32", "fp64") if f in named]
        falls = all(a > b for a, b in itertools.pairwise(order))
        cases.append((name, falls, " > ".join(f"{value:.2g}" for value in order)))
    return decide(cases)


def _tenfold(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "5")
    if points is None:
        return _untested("the forward pass")
    cases = []
    for name, group in _groups(points):
        found = [(cell.seqlen, median(values)) for cell, values in ratios(group)]
        there = sorted((n, x) for n, x in found if x is not None)
        hit = [n for n, x in there if TENFOLD[0] <= x <= TENFOLD[1]]
        numbers = ", ".join(f"{x:.2g}x at {n}" for n, x in there)
        where = f"{name}, lengths {', '.join(map(str, hit))}" if hit else name
        cases.append((where, bool(hit), numbers))
    return decide(cases)


def _more_than_baseline(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "4")
    if points is None:
        return _untested("the forward pass")
    low = [(c, r) for c, r in points if c.format in ("bf16", "fp16")]
    cases = []
    for name, group in _groups(low):
        found = {c.format: median(values) or 0.0 for c, values in ratios(group)}
        holds = all(value >= MORE for value in found.values())
        numbers = ", ".join(f"{f.upper()} {x:.2g}x" for f, x in found.items())
        cases.append((name, holds, numbers))
    return decide(cases)


def _growth(metric: str, pair: str) -> Callable[[Evidence], Outcome]:
    def judge(evidence: Evidence) -> Outcome:
        points = _figure(evidence, "5")
        if points is None:
            return _untested("the forward pass")
        cases = []
        for name, group in _groups(points):
            ends = sorted(group, key=lambda point: point[0].seqlen)
            first, last = (_median_of(r, pair, metric) for r in (ends[0][1], ends[-1][1]))
            lengths = f"{ends[0][0].seqlen} to {ends[-1][0].seqlen}"
            growth = last / first if first else float("nan")
            cases.append((name, growth >= GROWTH, f"{growth:.2g}x from length {lengths}"))
        return decide(cases)

    return judge


def _shape(figure: str, other: str) -> Callable[[Evidence], Outcome]:
    def judge(evidence: Evidence) -> Outcome:
        points = _figure(evidence, figure)
        if points is None:
            return _untested("the forward pass")
        wide: list[tuple[str, bool, str]] = []
        equal: list[tuple[str, bool, str]] = []
        for inputs in inputs_of(points):
            group = [(c, r) for c, r in points if c.inputs == inputs]
            # Two cells for each memory size, the paper's shape and the other.
            for (cell, result), (changed, found) in zip(group[::2], group[1::2], strict=True):
                ratio = _median_of(found, "flash") / _median_of(result, "flash")
                changes = max(ratio, 1 / ratio) >= MORE
                label = f"{title(inputs)}, M/4d = {cell.block_c} > d"
                case = (label, changes, f"{ratio:.2g}x")
                (equal if changed.block_c == cell.block_c else wide).append(case)
        cases = wide
        if equal:
            changed_any = any(holds for _, holds, _ in equal)
            values = sorted({text for _, _, text in equal})
            cases.append((f"{other}, M/4d up to d", changed_any, ", ".join(values)))
        return decide(cases)

    return judge


def _larger(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "6c")
    if points is None:
        return _untested("the forward pass")
    cases = []
    for name, group in _groups(points):
        for number_format in sorted({c.format for c, _ in group}):
            here = sorted(
                ((c.block_c, _median_of(r, "flash")) for c, r in group if c.format == number_format)
            )
            ratio = here[-1][1] / here[0][1]
            cases.append(
                (
                    f"{name}, {number_format.upper()}",
                    ratio <= FALL,
                    f"{ratio:.2g}x from B_c = {here[0][0]} to {here[-1][0]}",
                )
            )
    return decide(cases)


def _rows(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "rows")
    if points is None:
        return _untested("the forward pass")
    cases = []
    for name, group in _groups(points):
        sizes = sorted(c.block_r for c, _ in group)
        same = all(r["flash"] == group[0][1]["flash"] for _, r in group)
        text = f"B_r = {', '.join(map(str, sizes))}: {'equal' if same else 'different'} results"
        cases.append((name, same, text))
    return decide(cases)


def _rescale(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "ablation")
    if points is None:
        return _untested("the forward pass")
    cases = []
    for name, group in _groups([(c, r) for c, r in points if c.preset == "paper"]):
        whole = next(_median_of(r, "flash") for c, r in group if not c.only and not c.exempt)
        alone = {c.only: _median_of(r, "flash") / whole for c, r in group if c.only}
        if "rescale" not in alone:
            continue
        order = sorted(alone.items(), key=lambda item: -item[1])[:3]
        text = f"rescale factor {alone['rescale']:.1%} of the whole; largest: "
        text += ", ".join(f"{step.replace('_', ' ')} {share:.0%}" for step, share in order)
        cases.append((name, alone["rescale"] >= MINOR and order[0][0] == "rescale", text))
    return decide(cases)


def _bias(evidence: Evidence) -> Outcome:
    points = _figure(evidence, "bias")
    if points is None:
        return _untested("the forward pass")

    def sigmas(wanted: tuple[str, str, int, bool], place: str) -> tuple[float, float] | None:
        for cell, result in points:
            if (cell.format, cell.inputs, cell.ties, cell.shifted) == wanted:
                found = result[place]
                count = len(found["away"])
                mean = sum(found["away"]) / count
                error = sum(found["stderr"]) / count / count**0.5
                return mean, abs(mean) / error
        return None

    cases = []
    two = ("bf16", "one_sign", 2, False)
    for label, wanted, place, biased in (
        ("V of one sign, two keys at the maximum", two, "product", True),
        ("the same, V of both signs", ("bf16", "two_signs", 2, False), "product", False),
        ("the same, maximum moved so that P < 1", ("bf16", "one_sign", 2, True), "product", False),
        ("the same, stochastic rounding", ("bf16:sr", "one_sign", 2, False), "product", False),
        ("the same, divided by l before it is rounded, as kernels do", two, "output", False),
    ):
        found = sigmas(wanted, place)
        if found is not None:
            expected = "biased" if biased else "not biased"
            cases.append(
                (
                    f"{label} ({expected})",
                    (found[1] >= BIAS_SIGMAS and abs(found[0]) >= BIAS_ULP) == biased,
                    f"{found[0]:+.3f} ULP, {found[1]:.0f} standard errors",
                )
            )
    return decide(cases)


def _on_gpu(evidence: Evidence) -> bool:
    return evidence.kernels is not None and evidence.kernels["configuration"]["device"] == "cuda"


def _real_kernels(evidence: Evidence) -> Outcome:
    if evidence.kernels is None or not _on_gpu(evidence):
        return _untested("real kernels on a GPU")
    points = [p for p in evidence.kernels["forward"] if p["format"] == "bf16"]
    cases = []
    names = [n for n in ("ours", "torch_flash") if any(p["backend"] == n for p in points)]
    for backend in names:
        for inputs in sorted({p["inputs"] for p in points}):
            found = []
            for point in points:
                if (point["backend"], point["inputs"]) != (backend, inputs):
                    continue
                other = next(
                    p for p in points
                    if p["backend"] == "baseline"
                    and all(p[k] == point[k] for k in ("inputs", "seqlen", "head_dim"))
                )  # fmt: skip
                down = median(other["result"]["max"])
                up = median(point["result"]["max"])
                if up is not None and down:
                    found.append(up / down)
            low, high = min(found), max(found)
            cases.append(
                (f"{backend}, {title(inputs)}", high >= TENFOLD[0], f"{low:.2g}x to {high:.2g}x")
            )
    return decide(cases)


def _agreement(evidence: Evidence) -> Outcome:
    if evidence.kernels is None or not _on_gpu(evidence):
        return _untested("real kernels on a GPU")
    cases, controls = [], []
    for point in evidence.kernels["agreement"]:
        label = f"{point['preset']}, {point['format'].upper()}, d = {point['head_dim']}, "
        label += title(point["inputs"])
        text = f"{point['equal']:.2%} equal, {point['within_1_ulp']:.3%} within 1 ULP, "
        text += f"largest {point['largest_ulp']:.0f} ULP"
        if point["preset"] == CONTROL:
            controls.append(f"{label} (P in FP32): {text}")
            continue
        agree = point["within_1_ulp"] >= AGREEMENT and point["equal"] >= EQUAL
        cases.append((label, agree, text))
    outcome = decide(cases)
    return Outcome(outcome.verdict, outcome.numbers + controls, outcome.condition)


def _our_noise(evidence: Evidence) -> Outcome:
    if evidence.kernels is None:
        return _untested("real kernels")
    cases = []
    points = [p for p in evidence.kernels["run_to_run"] if p["backend"] == "ours"]
    for output in ("out", "dq", "dk", "dv"):
        found = [p for p in points if p["output"] == output]
        if found:
            same = all(p["same_bits"] for p in found)
            repeats = found[0]["repeats"]
            text = f"{repeats} runs, {'the same bits' if same else 'different bits'}"
            cases.append((output, same, text))
    if points and not any(p["output"] == "dq" for p in points):
        cases.append(("gradients", False, "no backward here"))
    noise = [
        f"{p['backend']} {p['output']} {p['relative']:.1e} at length {p['seqlen']}"
        for p in evidence.kernels["run_to_run"]
        if not p["same_bits"]
    ]
    outcome = decide(cases)
    others = [f"Others that differ from run to run, relative: {', '.join(noise)}"] if noise else []
    return Outcome(outcome.verdict, outcome.numbers + others, outcome.condition)


def _speed(evidence: Evidence) -> Outcome:
    if evidence.kernels is None or not _on_gpu(evidence):
        return _untested("real kernels on a GPU")
    cases = [
        (
            f"{point['backend']}, {point['model']}",
            point["speedup"] >= SPEEDUP,
            f"{point['speedup']:+.0%} ({point['milliseconds']:.1f} ms a step)",
        )
        for point in evidence.kernels["speed"]
        if point["backend"] in ("ours", "torch_flash") and "speedup" in point
    ]
    return decide(cases)


def _runs(evidence: Evidence) -> dict[str, Any] | None:
    return None if evidence.training is None else evidence.training["runs"]


def _late(history: dict[str, Any], measure: str) -> float:
    return mean_over_matrices(history, measure)[-1]


def _repeat(evidence: Evidence) -> Outcome:
    runs = _runs(evidence)
    if runs is None or "repeat" not in runs:
        return _untested("training")
    largest = max(max(values) for values in runs["repeat"]["history"]["max_difference"])
    return decide([("repeat of base", largest == 0, f"largest difference of a weight {largest:g}")])


def _less_than_init(evidence: Evidence) -> Outcome:
    runs = _runs(evidence)
    if runs is None or not {"flash", "init"} <= set(runs):
        return _untested("training")
    cases = []
    for measure, label in (("max_difference", "max difference"), ("wasserstein", "Wasserstein")):
        flash = _late(runs["flash"]["history"], measure)
        init = _late(runs["init"]["history"], measure)
        cases.append((label, flash < init, f"flash {flash:.2g}, other init {init:.2g} at the end"))
    return decide(cases)


def _slope(evidence: Evidence) -> Outcome:
    """Growth per step in the second half, step-0 value subtracted (it does not matter for it)."""
    runs = _runs(evidence)
    if runs is None or not {"flash", "init"} <= set(runs):
        return _untested("training")
    cases = []
    for measure, label in (("max_difference", "max difference"), ("wasserstein", "Wasserstein")):
        slopes = {}
        for name in ("flash", "init"):
            history = runs[name]["history"]
            values = without_start(mean_over_matrices(history, measure))
            slopes[name] = _fit(history["steps"], values)
        text = f"flash {slopes['flash']:.2g}, other init {slopes['init']:.2g} per 1000 steps"
        cases.append((label, slopes["flash"] <= slopes["init"], text))
    return decide(cases)


def _fit(steps: list[int], values: list[float]) -> float:
    """Least-squares slope per 1000 steps over the second half."""
    half = [(s, v) for s, v in zip(steps, values, strict=True) if s >= steps[-1] / 2]
    mean_s = sum(s for s, _ in half) / len(half)
    mean_v = sum(v for _, v in half) / len(half)
    spread = sum((s - mean_s) ** 2 for s, _ in half)
    if spread == 0:
        return 0.0
    return 1000 * sum((s - mean_s) * (v - mean_v) for s, v in half) / spread


def _low_precision(evidence: Evidence) -> Outcome:
    runs = _runs(evidence)
    if runs is None or "flash" not in runs:
        return _untested("training")
    flash = runs["flash"]["history"]
    steps = flash["steps"]
    mean_flash = mean_over_matrices(flash, "wasserstein")
    cases = []
    for name, label in (
        ("pure_bf16", "BF16 weights against FP32 weights"),
        ("fp32", "BF16 autocast against FP32"),
        ("fp16", "BF16 autocast against FP16 autocast"),
    ):
        if name not in runs:
            continue
        values = mean_over_matrices(runs[name]["history"], "wasserstein")
        places = sorted({min(3, len(steps) - 1), len(steps) // 2, len(steps) - 1})
        found = [(steps[i], values[i] / mean_flash[i]) for i in places if mean_flash[i]]
        cases += [
            (f"{label}, step {step}", ratio >= LOWER[0], f"{_short(ratio)}x flash")
            for step, ratio in found
        ]
    return decide(cases)


def _short(value: float) -> str:
    """Two significant digits, without an exponent for hundreds."""
    return f"{value:.2g}" if value < 100 else f"{value:.0f}"


def _size_hardly_matters(evidence: Evidence) -> Outcome:
    runs = _runs(evidence)
    if runs is None or not {"flash", "sdpa"} <= set(runs):
        return _untested("training")
    live = evidence.training["live"] if evidence.training else []
    forward = ""
    if live:
        flash = sum(p["flash_max"] for p in live) / len(live)
        base = sum(p["baseline_max"] for p in live) / len(live)
        forward = f"; forward deviation inside the model: tiled {flash:.2g}, explicit {base:.2g}"
    late = {n: _late(runs[n]["history"], "max_difference") for n in ("flash", "sdpa")}
    ratio = max(late.values()) / min(late.values()) if min(late.values()) else float("inf")
    text = f"flash {late['flash']:.2g}, torch's kernel {late['sdpa']:.2g} at the end{forward}"
    return decide([("max difference within a factor of 2", ratio <= 2, text)])


PAPER = "Golden et al. 2024"
NEWER = "Qiu and Yao 2025, arXiv 2510.04212"
OURS = "this project"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "formats", f"{PAPER}, Fig. 3",
        "The difference between flash and baseline attention falls with every wider number format.",
        "Median over draws of max |flash - baseline|: BF16 > FP16 > FP32 > FP64.",
        _formats, ("fig3",),
    ),
    Claim(
        "tenfold", f"{PAPER}, abstract and Fig. 4",
        "At BF16, flash attention deviates about ten times as much as baseline attention.",
        f"Median ratio of max |output - FP64|, flash over baseline, of {TENFOLD[0]:g} to "
        f"{TENFOLD[1]:g} at some length.",
        _tenfold, ("fig5-ratio",),
    ),
    Claim(
        "more", f"{PAPER}, Fig. 4",
        "Flash attention is further from the FP64 value than baseline attention.",
        f"The same ratio is at least {MORE:g} in BF16 and in FP16.",
        _more_than_baseline, ("fig4",),
    ),
    Claim(
        "length-max", f"{PAPER}, Fig. 5a",
        "The largest difference between the two grows with the sequence length.",
        f"max |flash - baseline|, BF16: at least {GROWTH:g}x from the shortest to the longest.",
        _growth("max", "difference"), ("fig5a",),
    ),
    Claim(
        "length-relative", f"{OURS}, on Fig. 5a",
        "So does the largest difference relative to the largest output.",
        f"max |flash - baseline| / max |baseline|: at least {GROWTH:g}x.",
        _growth("max_relative", "difference"), ("fig5a",),
    ),
    Claim(
        "length-mean", f"{PAPER}, Fig. 5b",
        "Mean and spread of flash's deviation grow with the sequence length.",
        f"mean |flash - FP64|, BF16: at least {GROWTH:g}x.",
        _growth("mean", "flash"), ("fig5b",),
    ),
    Claim(
        "swapped", f"{PAPER}, Fig. 6a",
        "Swapping the two block sizes changes the deviation.",
        f"Median max |flash - FP64|, swapped sizes over the paper's: at least {MORE:g}, or at most "
        "the inverse.",
        _shape("6a", "swapped"), ("fig6a",),
    ),
    Claim(
        "square", f"{PAPER}, Fig. 6b",
        "Square blocks change the deviation.",
        "The same with square blocks.",
        _shape("6b", "square"), ("fig6b",),
    ),
    Claim(
        "larger", f"{PAPER}, Fig. 6c",
        "Larger blocks lower the deviation.",
        f"Median max |flash - FP64|, largest over smallest B_c: at most {FALL:g}.",
        _larger, ("fig6c",),
    ),
    Claim(
        "rows", f"{OURS}, on Fig. 6",
        "B_r has no effect on any bit: only B_c matters.",
        "Tiles computed one by one, every product summed in one order: equal deviations.",
        _rows,
    ),
    Claim(
        "rescale", f"{PAPER}, explanation of Fig. 6c as we read it",
        "The rescaling factors that tiling adds are where the deviation comes from.",
        f"BF16 in one step alone: the factor is the largest step, and at least {MINOR:.0%} of all.",
        _rescale, ("ablation",),
    ),
    Claim(
        "bias", NEWER,
        "Rounding of P V is biased where several P are 1 and V has one sign; not otherwise, and "
        "not where the maximum is moved.",
        f"Mean signed error of P V: at least {BIAS_ULP:g} ULP and {BIAS_SIGMAS:g} standard errors.",
        _bias, ("bias",),
    ),
    Claim(
        "real", f"{PAPER}, abstract, on real kernels",
        "Real flash kernels deviate about ten times as much as explicit attention at BF16.",
        f"max |output - FP64| over that of explicit attention: {TENFOLD[0]:g} at some length.",
        _real_kernels, ("kernels-forward",),
    ),
    Claim(
        "agreement", OURS,
        "The presets kernel and tree are what this project's CUDA kernels compute.",
        f"Share of elements within 1 ULP of the output format: at least {AGREEMENT:.0%}; equal: at "
        f"least {EQUAL:.0%}. A control with P in FP32 shows what a wrong model gives.",
        _agreement,
    ),
    Claim(
        "noise", OURS,
        "This project's forward and backward have no run-to-run variance.",
        "The same call again and again: equal bits.",
        _our_noise, ("kernels-run-to-run", "kernels-backward"),
    ),
    Claim(
        "speedup", f"{PAPER}, introduction",
        "Flash attention speeds up training of a text-to-image model by 14 %.",
        f"Time of a training step with explicit attention over that with flash, less 1: at least "
        f"{SPEEDUP:.0%}.",
        _speed,
    ),
    Claim(
        "repeat", OURS,
        "A repeated training gives the same weights (control).",
        "Every weight difference at every step is 0.",
        _repeat, ("fig7",),
    ),
    Claim(
        "init", f"{PAPER}, Fig. 7",
        "Weights change less by flash attention than by another initialisation.",
        "Max difference and Wasserstein distance, mean over the weight matrices, at the last step.",
        _less_than_init, ("fig7",),
    ),
    Claim(
        "slope", f"{PAPER}, Fig. 7, step-0 value subtracted",
        "They also move apart no faster by flash attention than by another initialisation.",
        "Least-squares slope over the second half of the training: flash's is not the larger.",
        _slope, ("fig7", "fig8"),
    ),
    Claim(
        "low-precision", f"{PAPER}, abstract and Fig. 8",
        "Flash attention's effect on weights is 2 to 5 times less than low-precision training's.",
        f"Wasserstein distance by the number format over that by flash: at least "
        f"{LOWER[0]:g}, early, in the middle and at the end.",
        _low_precision, ("fig8",),
    ),
    Claim(
        "size", OURS,
        "That a forward deviation exists matters to the weights; its size hardly does.",
        "Weights after training with the tiled preset paper and with torch's accurate kernel are "
        "about equally far from base.",
        _size_hardly_matters, ("fig7", "live"),
    ),
)  # fmt: skip
