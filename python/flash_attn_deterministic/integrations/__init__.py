"""Integrations: each module is imported by name, and requires the package of that name.

`alias` makes `import flash_attn` give this package. `torch` registers the kernels with
scaled_dot_product_attention, `transformers` with its models, `vllm` and `sglang` with
their engines.
"""
