"""The claims of the Piper paper, R1 to R6, computed here. `docs/paper.md` explains each table.

python -m benchmarks.paper r1
"""
