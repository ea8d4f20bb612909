"""The search for a program: the fastest one that fits, of all that a module and a machine allow."""

from lightning_piper.search.proposing import Proposal, search
from lightning_piper.search.report import Found
from lightning_piper.search.searching import best_of
from lightning_piper.search.space import Candidate, Layout, Space, bytes_of
from lightning_piper.search.workload import Block, Work, Workload
from lightning_piper.search.writing import Written

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
