"""The paged KV cache: layout arithmetic and tensors."""
