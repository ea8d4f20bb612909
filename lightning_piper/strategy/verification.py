"""What `PiperStrategy(verify=...)` does before the first step."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn

from lightning_piper.compiler import Compiled
from lightning_piper.errors import VerificationError
from lightning_piper.strategy.world import World
from lightning_piper.verify import verify_step

Verify = Literal["static", "first_batch", "each", "off"]
ACCEPTED = get_args(Verify)


def verify_by_execution(how: Verify, compiled: Compiled, module: nn.Module, batch: Any, world: World) -> None:
    """Run the program on a batch, on the lead, where the whole module still is; all processes fail together.

    Raises:
        VerificationError: the finished program (`first_batch`) or a directive (`each`) does not compute what one device does.
    """
    if how not in ("first_batch", "each"):
        return

    def run() -> None:
        module.to(world.device)
        with isolate_rng():
            report = verify_step(compiled.step, module, batch, compiled.program)
        if how == "each":
            rank_zero_info(str(report))
            report.require()
        elif report.rows[-1].single.verdict == "differs":
            raise VerificationError(f"the program does not compute what one device computes on the first batch:\n{report}")

    world.on_lead(run)
