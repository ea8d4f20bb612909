"""Runs the programs of several simulated devices. Each program has its own thread, and one thread runs at a
time.

A program runs until its host waits for work that the other programs have not issued yet. Then the next
program takes its turn. The order of turns is fixed, so that a run can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from lightning_piper.accelerators.simulated_device import Host, Simulated


class _Turns:
    """The turns of several threads. One thread runs at a time. A thread passes its number as `own`."""

    def __init__(self, count: int) -> None:
        self._changed = threading.Condition()
        self._turn: int | None = 0
        self._running = list(range(count))
        self.stuck: set[int] = set()  # threads that could not continue since any thread last made progress
        self.failed: BaseException | None = None

    def begin(self, own: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == own)

    def give(self, own: int) -> None:
        """Give the turn to the next thread, and wait for the next turn.

        The state of the CPU's random number generator is the same after the wait.

        Raises:
            BaseException: The exception of a thread that has failed.
        """
        state = torch.get_rng_state()
        self._pass(own)
        self.begin(own)
        torch.set_rng_state(state)
        if self.failed is not None:
            raise self.failed

    def end(self, own: int) -> None:
        self.stuck.clear()
        self._pass(own, leave=True)

    def _pass(self, own: int, leave: bool = False) -> None:
        with self._changed:
            index = self._running.index(own)
            following = self._running[(index + 1) % len(self._running)]
            if leave:
                self._running.remove(own)
            self._turn = following if self._running else None
            self._changed.notify_all()

    @property
    def all_stuck(self) -> bool:
        return self.stuck.issuperset(self._running)


def run_together(
    simulated: Simulated, hosts: Sequence[Host], programs: Sequence[Callable[[], object]]
) -> list[object]:
    """Run each host's program to its end, and return the results in the order of `hosts`.

    Raises:
        BaseException: The exception of the first program that failed.
    """
    turns = _Turns(len(hosts))
    results: list[object] = [None] * len(hosts)
    errors: list[BaseException] = []

    def run(own: int) -> None:
        """Run one program in its own thread, and record its result or its exception."""
        turns.begin(own)
        simulated.host = hosts[own]
        try:
            with simulated.modes():
                results[own] = programs[own]()
        except BaseException as error:
            errors.append(error)
            turns.failed = turns.failed or error
        finally:
            turns.end(own)

    def others(deadlock: Callable[[], BaseException]) -> None:
        """Let the other programs continue, until it is this program's turn again. If no program can continue,
        raise the error that `deadlock` makes."""
        own = hosts.index(simulated.host)
        turns.stuck.add(own)
        if turns.all_stuck:
            raise deadlock()
        turns.give(own)
        simulated.host = hosts[own]

    before, simulated.others = simulated.host, others
    simulated.progressed = turns.stuck.clear
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    simulated.host, simulated.others = before, None
    if errors:
        raise errors[0]
    return results
