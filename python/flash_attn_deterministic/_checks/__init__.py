"""Checks of arguments before an op is called.

They read shapes, strides, dtypes and devices, which torch.compile can trace, and no values: the
host would wait for the GPU. `index_values` is the exception, for the CPU ops.
"""
