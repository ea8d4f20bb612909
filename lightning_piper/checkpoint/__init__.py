"""Checkpoints: files that are whole or absent, and tensors in pieces, each written by a process that holds it."""
