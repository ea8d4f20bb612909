"""Compares published planners with this package's search on the planners' own profiles. Both estimates rate
each plan.

    python benchmarks/planners.py metis PATH
    python benchmarks/planners.py aceso PATH [--sizes 1_3B 2_6B]

PATH is a copy of the planner's repository: SamsungLabs/Metis, or microsoft/SuperScaler, branch Aceso.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import _aceso
import _metis


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    planners = parser.add_subparsers(dest="planner", required=True)
    for name in ("metis", "aceso"):
        planners.add_parser(name).add_argument("repository", type=Path)
    planners.choices["aceso"].add_argument(
        "--sizes", nargs="+", choices=_aceso.CASES, default=[*_aceso.CASES], help="of GPT"
    )
    args = parser.parse_args()
    if args.planner == "metis":
        _metis.compare(args.repository)
    else:
        for size in args.sizes:
            _aceso.compare(args.repository, size)


if __name__ == "__main__":
    main()
