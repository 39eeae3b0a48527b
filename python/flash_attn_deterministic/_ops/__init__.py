"""The ops of torch.ops.flash_attn_deterministic: schemas, implementations, autograd."""
