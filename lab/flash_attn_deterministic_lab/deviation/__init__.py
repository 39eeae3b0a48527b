"""How far low-precision attention is from exact attention, and what that does to training.

A study after Golden et al., "Is Flash Attention Stable?" (arXiv 2405.02803): `forward` is the
microbenchmark of the forward pass, `kernels` the same for real kernels, `training` compares the
weights of identical runs that differ in one thing, `report` makes one page of it. docs/deviation.md
has the definitions.
"""
