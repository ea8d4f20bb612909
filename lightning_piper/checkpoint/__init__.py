"""Checkpoints: files that are whole or absent, and sharded tensors, each range written by a process that holds it."""
