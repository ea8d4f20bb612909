"""lightning_piper: parallel training with PyTorch Lightning, by checked programs of directives.

A name is imported when it is first used, so importing the package does not import torch's compiler.
"""

from typing import TYPE_CHECKING

import lightning_piper.strategy  # noqa: F401  (registers the strategy's name)
from lightning_piper.common.lazy_imports import make_lazy

if TYPE_CHECKING:
    from lightning_piper import schedules
    from lightning_piper.annotate import annotate, annotate_modules
    from lightning_piper.averages import mean
    from lightning_piper.compiler import Compiled, compile, verify
    from lightning_piper.degrees import parallel
    from lightning_piper.directives import (
        ChunkLoss,
        Directive,
        Offload,
        Order,
        Place,
        Recompute,
        Replicate,
        ShardExperts,
        ShardSequences,
        ShardWeights,
        Split,
        register,
    )
    from lightning_piper.errors import (
        CaptureError,
        DirectiveError,
        ExecutionError,
        PiperError,
        VerificationError,
    )
    from lightning_piper.grouped_matmul import grouped_linear
    from lightning_piper.linear_cross_entropy import linear_cross_entropy
    from lightning_piper.pretrained import from_pretrained, save_pretrained
    from lightning_piper.profile import PiperProfiler, Schedule
    from lightning_piper.routing import combine, dispatch
    from lightning_piper.sample_gathering import gather_samples
    from lightning_piper.search import search
    from lightning_piper.strategy import LocalSGD, PiperStrategy, SpikeRecorder, grad_norm, whole_module
    from lightning_piper.tensor_parallel import tensor_parallel

__all__ = [
    "CaptureError",
    "ChunkLoss",
    "Compiled",
    "Directive",
    "DirectiveError",
    "ExecutionError",
    "LocalSGD",
    "Offload",
    "Order",
    "PiperError",
    "PiperProfiler",
    "PiperStrategy",
    "Place",
    "Recompute",
    "Replicate",
    "Schedule",
    "ShardExperts",
    "ShardSequences",
    "ShardWeights",
    "SpikeRecorder",
    "Split",
    "VerificationError",
    "annotate",
    "annotate_modules",
    "combine",
    "compile",
    "dispatch",
    "from_pretrained",
    "gather_samples",
    "grad_norm",
    "grouped_linear",
    "linear_cross_entropy",
    "mean",
    "parallel",
    "register",
    "save_pretrained",
    "schedules",
    "search",
    "tensor_parallel",
    "verify",
    "whole_module",
]

make_lazy(__name__, {
    # Sub-packages that are attributes without an import of their own
    "lightning_piper": [
        "directives", "errors", "ir", "ops", "profile", "schedules", "simulate", "strategy", "viz",
    ],
    "lightning_piper.annotate": ["annotate", "annotate_modules"],
    "lightning_piper.averages": ["mean"],
    "lightning_piper.compiler": ["Compiled", "compile", "verify"],
    "lightning_piper.degrees": ["parallel"],
    "lightning_piper.directives": [
        "ChunkLoss", "Directive", "Offload", "Order", "Place", "Recompute", "Replicate", "ShardExperts",
        "ShardSequences", "ShardWeights", "Split", "register",
    ],
    "lightning_piper.errors": [
        "CaptureError", "DirectiveError", "ExecutionError", "PiperError", "VerificationError",
    ],
    "lightning_piper.grouped_matmul": ["grouped_linear"],
    "lightning_piper.linear_cross_entropy": ["linear_cross_entropy"],
    "lightning_piper.pretrained": ["from_pretrained", "save_pretrained"],
    "lightning_piper.profile": ["PiperProfiler", "Schedule"],
    "lightning_piper.routing": ["combine", "dispatch"],
    "lightning_piper.sample_gathering": ["gather_samples"],
    "lightning_piper.search": ["search"],
    "lightning_piper.strategy": ["LocalSGD", "PiperStrategy", "SpikeRecorder", "grad_norm", "whole_module"],
    "lightning_piper.tensor_parallel": ["tensor_parallel"],
})  # fmt: skip
