"""Helpers that every package may import: limits, texts, users' files, lines of users' code, Lightning's two
packages, and garbage collection."""
