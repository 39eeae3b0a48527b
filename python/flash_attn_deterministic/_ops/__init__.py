"""The ops of torch.ops.flash_attn_deterministic, a module for each thing that an op needs."""
