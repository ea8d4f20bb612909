"""The shard of each value that a rank holds if tensors are sharded, and the communication that this needs."""
