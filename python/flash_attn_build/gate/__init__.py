"""Decides whether a wheel may be published: it needs its proof, for its exact bytes.

`decision.decide` takes a wheel, the reports that `flash-attn-deterministic verify` wrote, the
release policy and the state of the source tree, and returns every reason against publishing.
"""
