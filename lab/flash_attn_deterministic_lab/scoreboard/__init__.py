"""Which promises of equal bits an attention keeps."""
