"""Decide which shard of each value a rank holds if tensors are sharded, and where ranks communicate."""
