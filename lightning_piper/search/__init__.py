"""Search for the fastest program that fits into the memory of the devices."""

from lightning_piper.search.best_candidate import best_of
from lightning_piper.search.costs.workload import Block, Work, Workload
from lightning_piper.search.program_writer import Written
from lightning_piper.search.proposal import Proposal, search
from lightning_piper.search.report import Found
from lightning_piper.search.space import Candidate, Layout, Space, bytes_of

__all__ = [
    "Block",
    "Candidate",
    "Found",
    "Layout",
    "Proposal",
    "Space",
    "Work",
    "Workload",
    "Written",
    "best_of",
    "bytes_of",
    "search",
]
