"""Runs a part of the measurements, and prints a JSON object for each row."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import warnings

import torch

PARTS = ("memory", "qwen3", "recomputation", "overhead", "hardware", "precision")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, None if options.device == "cpu" else 0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same sums in each run
    for row in importlib.import_module(f"benchmarks.gpu.{options.part}").measured(device):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
