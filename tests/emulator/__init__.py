"""The kernels for a few queries, run on the CPU."""
