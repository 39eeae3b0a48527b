"""The ops of torch.ops.flash_attn_deterministic. `library` registers them; `run` calls them."""
