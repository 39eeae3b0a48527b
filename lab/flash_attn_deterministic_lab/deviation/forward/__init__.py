"""The study of emulated attention: sweeps of formats, lengths, blocks, steps, and gradients."""
