"""Measurements of `make gpu`. With `--device cpu` they run small, which only shows that they run.

python -m benchmarks.gpu memory [--device cuda]        # prints a JSON object for each row
"""

import sys
from pathlib import Path

# The benchmarks beside this folder import each other by file name.
sys.path.insert(0, str(Path(__file__).parents[1]))
