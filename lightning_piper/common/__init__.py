"""Helpers that every package may import: limits, texts, files of users, lines of users' code."""
