"""What an op accepts, in words for the caller: `ops.validate` checks one call.

Shapes, strides, dtypes and devices are read, which fake tensors have too. Values are read on the
CPU alone: the host would wait for a GPU.
"""
