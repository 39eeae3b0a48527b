"""The style sheet of the HTML report."""

from __future__ import annotations

from .svg import CLASSES, COLOURS

_SERIES = "".join(
    f".{name} {{ --series: {colour}; }}\n" for name, colour in zip(CLASSES, COLOURS, strict=True)
)
# A table wider than the page has a shadow at each edge that hides more of it.
STYLE = (
    """
:root { --text: #1c2430; --back: #fff; --soft: #5b6675; --line: #d8dee6; --panel: #f4f6f9;
  --good: #17703a; --bad: #b3261e; --wait: #8a5a00; --shade: #0003; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e9f0; --back: #14181e; --soft: #9aa6b5;
  --line: #343c47; --panel: #1d232b; --good: #5fc487; --bad: #ff8a80; --wait: #e6b45c;
  --shade: #fff3; } }
* { box-sizing: border-box; }
body { margin: 0; font: 16px/1.5 system-ui, sans-serif; color: var(--text);
  background: var(--back); }
header, main { max-width: 68rem; margin: 0 auto; padding: 1rem; }
header { border-bottom: 4px solid var(--wait); }
header.passed { border-color: var(--good); }
header.failed { border-color: var(--bad); }
h1 { margin: 0; font-size: 1.9rem; text-transform: capitalize; }
header.passed h1, .passed em, td.passed, th.passed { color: var(--good); }
header.failed h1, .failed em, .error em, td.failed, th.failed { color: var(--bad); }
header.incomplete h1, .not-run em { color: var(--wait); }
header p { margin: .3rem 0 0; overflow-wrap: anywhere; }
h2 { margin: 2rem 0 .5rem; font-size: 1.25rem; }
h3 { margin: 1.25rem 0 .5rem; font-size: 1rem; color: var(--bad); }
.notices { margin: 0 0 1rem; padding: .6rem 1rem .6rem 2rem; background: var(--panel);
  border-left: 4px solid var(--wait); }
.tiles { display: grid; gap: .75rem; margin-bottom: 1.25rem;
  grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); }
.tile { padding: .7rem .9rem; background: var(--panel); border-radius: .4rem; }
.tile span, .tile small, .tile em { display: block; font-style: normal; font-size: .85rem; }
.tile small { color: var(--soft); }
.tile b { display: block; font-size: 1.5rem; line-height: 1.3; }
.plots { display: grid; gap: 1.5rem 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); }
figure { margin: 0; max-width: 30rem; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.legend { margin: 0 0 .3rem; font-size: .85rem; color: var(--soft); }
.legend span { margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em;
  border-radius: 2px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--text); paint-order: stroke; stroke: var(--back);
  stroke-width: 3px; }
svg .n { fill: var(--soft); }
.limit { stroke: var(--bad); stroke-dasharray: 4 3; }
.scroll { overflow-x: auto; margin-bottom: .75rem; background-repeat: no-repeat;
  background-size: 2.5rem 100%, 2.5rem 100%, .9rem 100%, .9rem 100%;
  background-position: 0 0, 100% 0, 0 0, 100% 0;
  background-attachment: local, local, scroll, scroll;
  background-image: linear-gradient(to right, var(--back) 40%, transparent),
    linear-gradient(to left, var(--back) 40%, transparent),
    linear-gradient(to right, var(--shade), transparent),
    linear-gradient(to left, var(--shade), transparent); }
.scroll:focus-visible { outline: 2px solid var(--soft); }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .7rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
tbody th { font-weight: 500; }
th.n, td.n { text-align: right; white-space: nowrap; }
td.passed, td.failed, .matrix td, .matrix th { white-space: nowrap; }
.matrix th:first-child { position: sticky; left: 0; background: var(--back); }
.reasons { margin: 0; padding-left: 1.2rem; color: var(--bad); overflow-wrap: anywhere; }
.facts td { overflow-wrap: anywhere; min-width: 10rem; }
.facts th { white-space: nowrap; color: var(--soft); }
summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; padding: .7rem; background: var(--panel); font-size: .8rem; }
i[class] { background: var(--series); }
svg rect[class] { fill: var(--series); }
footer { margin-top: 2rem; font-size: .8rem; color: var(--soft); overflow-wrap: anywhere; }
@media (max-width: 30rem) { .facts th { white-space: normal; } body { font-size: 15px; } }
"""
    + _SERIES
)
