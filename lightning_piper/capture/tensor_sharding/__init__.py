"""Which shard of each value does a rank hold if tensors are sharded, and which communication does that
need?
"""
