"""Ways into other packages: each module here is imported by name, and needs that package.

`as_flash_attn` puts this package in the place of flash_attn in a running process. `torch` offers
the kernels to scaled_dot_product_attention, `transformers` to its models, `vllm` to its engine.
"""
