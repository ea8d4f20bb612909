"""Operations: all kinds of nodes, one file for each family.

A file has the node, its instructions, its static rule, its reference semantics, its lowering to a plan and
its runtime. `register_operation` adds an operation of your own.
"""

from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.arguments import Arguments
from lightning_piper.ops.base import (
    ENTRY_POINTS,
    Binding,
    Exchange,
    Operation,
    Planning,
    about,
    operation_of,
    register_operation,
)
from lightning_piper.ops.build import build_dag, chain_state
from lightning_piper.ops.chunk import make_chunk
from lightning_piper.ops.communication.all_to_all import AllToAll
from lightning_piper.ops.communication.bucket import Pack
from lightning_piper.ops.communication.gather import AllGather, Parameters
from lightning_piper.ops.communication.gather_samples import GatherSamples, ScatterSamples
from lightning_piper.ops.communication.p2p import Recv, Send
from lightning_piper.ops.communication.reduce import AllReduce, AllReduceShards, ReduceScatter
from lightning_piper.ops.communication.total import Total
from lightning_piper.ops.early_update import EarlyUpdate
from lightning_piper.ops.facts import Facts
from lightning_piper.ops.host import Fetch, Store
from lightning_piper.ops.instruction import Collective, Instruction, Read
from lightning_piper.ops.metrics import Metrics, MetricsSum, StepReport
from lightning_piper.ops.order import Barrier
from lightning_piper.ops.reference import Reference
from lightning_piper.ops.results import Result
from lightning_piper.ops.samples import Concat, Cut
from lightning_piper.ops.update import Accumulate, Update

__all__ = [
    "ENTRY_POINTS",
    "Accumulate",
    "AllGather",
    "AllReduce",
    "AllReduceShards",
    "AllToAll",
    "Arguments",
    "Barrier",
    "Binding",
    "Chunk",
    "Collective",
    "Concat",
    "Cut",
    "EarlyUpdate",
    "Exchange",
    "Facts",
    "Fetch",
    "GatherSamples",
    "Instruction",
    "Metrics",
    "MetricsSum",
    "Operation",
    "Pack",
    "Parameters",
    "Planning",
    "Read",
    "Recv",
    "ReduceScatter",
    "Reference",
    "Result",
    "ScatterSamples",
    "Send",
    "StepReport",
    "Store",
    "Total",
    "Update",
    "about",
    "build_dag",
    "chain_state",
    "make_chunk",
    "operation_of",
    "register_operation",
]
