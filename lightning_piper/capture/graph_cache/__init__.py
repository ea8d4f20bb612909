"""Graphs of steps that were traced before."""
