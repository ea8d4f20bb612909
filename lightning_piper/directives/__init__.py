"""Directives. Each file defines one rewrite of the training DAG, with its fields and its checks."""

from lightning_piper.directives.base import Directive, known, register
from lightning_piper.directives.chunk_loss import ChunkLoss
from lightning_piper.directives.offload import Offload
from lightning_piper.directives.order import Order
from lightning_piper.directives.place import Place
from lightning_piper.directives.program import Program, parse, replicas_of, to_json
from lightning_piper.directives.recompute import Recompute
from lightning_piper.directives.replicate import Replicate
from lightning_piper.directives.shard_experts import ShardExperts
from lightning_piper.directives.split import Split, accumulating
from lightning_piper.directives.tensor_shards import ShardSequences, ShardWeights

__all__ = [
    "ChunkLoss",
    "Directive",
    "Offload",
    "Order",
    "Place",
    "Program",
    "Recompute",
    "Replicate",
    "ShardExperts",
    "ShardSequences",
    "ShardWeights",
    "Split",
    "accumulating",
    "known",
    "parse",
    "register",
    "replicas_of",
    "to_json",
]
