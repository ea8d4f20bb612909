"""Checkpoints: files that are complete or absent, and sharded tensors whose ranges their holders write."""
