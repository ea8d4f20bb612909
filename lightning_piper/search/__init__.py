"""Programs that nobody wrote: the fastest one that fits, of all that a module and a machine allow."""

from lightning_piper.search.report import Found
from lightning_piper.search.searching import search
from lightning_piper.search.space import Candidate, Layout, Space, bytes_of
from lightning_piper.search.workload import Block, Work, Workload

__all__ = ["Block", "Candidate", "Found", "Layout", "Space", "Work", "Workload", "bytes_of", "search"]
