"""Checks of arguments before an op is called.

They read shapes, strides, dtypes and devices only, never a tensor's values: those would have to be
waited for, and torch.compile can trace the rest with dynamic shapes.
"""
