"""What `PiperStrategy(verify=...)` does before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.errors import PiperError, VerificationError
from lightning_piper.strategy.materialize import is_on_meta
from lightning_piper.strategy.world import World
from lightning_piper.verify import verify_step

Verify = Literal["static", "first_batch", "each", "off"]
ACCEPTED = get_args(Verify)


def verify_by_execution(
    how: Verify, compiled: Compiled, module: nn.Module, leaves: Sequence[torch.Tensor], world: World
) -> str | None:
    """Run the program on a batch, on the lead, where the whole module still is; all processes fail together. Returns
    the report there, and None elsewhere or if nothing was run.

    Args:
        leaves: of this process's batch; those of all replicas have the same shapes.

    Raises:
        VerificationError: the finished program (`first_batch`) or a directive (`each`) does not compute what one device does.
    """
    if how not in ("first_batch", "each"):
        return None

    shares = world.gather([x.cpu() for x in leaves] if world.rank in world.speakers else [])

    def run() -> str:
        if is_on_meta(module):
            raise PiperError(
                f"PiperStrategy(verify={how!r}) runs the whole module in one process, and this one is on the meta device; use "
                "verify='static' here, and verify by execution with transport='local' or a smaller model"
            )
        module.to(world.device)
        parts = zip(*(shares[rank] for rank in world.speakers), strict=True)
        batch = [(torch.cat(xs) if xs[0].ndim else xs[0]).to(world.device) for xs in parts]
        with isolate_rng():
            report = verify_step(compiled.step, module, compiled.step.layout.rebuild(batch), compiled.program)
        if how == "each":
            rank_zero_info(str(report))
            report.require()
        elif report.rows[-1].single.verdict == "differs":
            raise VerificationError(f"the program does not compute what one device computes on the first batch:\n{report}")
        return str(report)

    return world.on_lead(run, share=False)
