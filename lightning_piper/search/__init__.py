"""Programs that nobody wrote: the fastest one that fits, of all that a module and a machine allow."""

from lightning_piper.search.workload import Block, Work, Workload

__all__ = ["Block", "Work", "Workload"]
