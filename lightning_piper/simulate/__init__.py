"""Run plans in virtual time, to predict how long a step takes, when devices are idle, and how much memory the
step needs. This needs no device::

    result = simulate(compiled.dag, compiled.plans, {"F": 1, "B": 2}, Network(Link(latency=0.1)))
    print(result)                      # a table of figures
    result.devices[0].bubble           # the figures of a device
    result.timeline                    # the work of each stream, with start and end
"""

from lightning_piper.simulate.chakra import write_chakra
from lightning_piper.simulate.durations import DEFAULT, Durations, Number, read_durations
from lightning_piper.simulate.engine import Span
from lightning_piper.simulate.figures import DeviceFigures, Shares, Simulation, figures, simulate
from lightning_piper.simulate.hardware import Hardware
from lightning_piper.simulate.issue_cost import IssueCost
from lightning_piper.simulate.network import Link, Network, SharedLink

__all__ = [
    "DEFAULT",
    "DeviceFigures",
    "Durations",
    "Hardware",
    "IssueCost",
    "Link",
    "Network",
    "Number",
    "SharedLink",
    "Shares",
    "Simulation",
    "Span",
    "figures",
    "read_durations",
    "simulate",
    "write_chakra",
]
