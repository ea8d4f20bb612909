"""The bytes of a step's values over virtual time."""

from __future__ import annotations

import pytest

from lightning_piper.ops.update import Update
from lightning_piper.plan.instructions import Instruction, WaitSend
from lightning_piper.simulate import Link, Network, simulate
from tests.models import CASES
from tests.plan.programs import edited, place, split
from tests.simulate.programs import ROW, WIDTH, captured, compiled, pipeline

GRADS = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer's gradients
LOSS, METRICS = 4, 8


def test_one_device_computed_by_hand() -> None:
    program = pipeline("gpipe", 1, 1)
    figures = simulate(program.dag, program.plans).devices[0]
    assert figures.memory == (
        (0, 0),
        # in F: its result, which is saved, and the square of it, of which the loss is the mean
        (0, 2 * ROW + LOSS),
        # the loss moves into the vector of metrics
        (1, ROW + LOSS), (1, ROW + LOSS + METRICS), (1, ROW + METRICS),
        # in B: the gradient of the sum is still there when those of the layer are
        (1, ROW + METRICS + GRADS),
        (3, METRICS + GRADS),  # B ends
        (3, GRADS),  # the metrics are reported; gradients stay to the end
    )  # fmt: skip
    assert figures.peak_bytes == ROW + METRICS + GRADS
    assert figures.in_flight == ((0, 0), (0, 1), (3, 0)) and figures.peak_in_flight == 1


def test_messages_need_memory_until_they_are_sent_and_from_when_they_are_waited_for() -> None:
    """The first of two stages, one microbatch: F 0 to 1, its message until 4, F and B of the other stage
    until 7, its message until 10, B until 12.
    """
    program = pipeline("gpipe", 2, 1)
    figures = simulate(program.dag, program.plans, {"F": 1, "B": 2}, Network(Link(latency=3))).devices[0]
    assert figures.memory == (
        (0, 0),
        (0, ROW),  # room for its gradient, which is received at 10: its receive is posted first
        (0, 3 * ROW),  # in F: the sum, and its tanh, which is sent and saved
        (1, 2 * ROW),  # that it is sent, until 4, needs no other memory than that it is saved
        (1, 2 * ROW + METRICS),  # the sum of the metrics is under way
        (10, ROW + METRICS + GRADS),  # in B: the gradient of the sum, and those of the layer
        (12, METRICS + GRADS),
        (12, GRADS),
    )


def test_a_later_retirement_holds_more() -> None:
    """The control of the test above: with the retirement at the end of the plan, the activation stays to the
    end.
    """
    program = pipeline("gpipe", 2, 1)

    def retire_last(instructions: list[Instruction]) -> None:
        (wait_send,) = [i for i in instructions if isinstance(i, WaitSend)]
        instructions.remove(wait_send)
        instructions.append(wait_send)

    plans = {**program.plans, 0: edited(program.plans[0], retire_last)}
    figures = simulate(program.dag, plans, {"F": 1, "B": 2}, Network(Link(latency=3))).devices[0]
    assert figures.peak_bytes == 2 * ROW + METRICS + GRADS and (12, ROW + GRADS) in figures.memory


def test_one_f_one_b_needs_less_than_gpipe() -> None:
    peaks = {}
    for schedule in ("gpipe", "one_f_one_b"):
        program = pipeline(schedule, 4, 8)
        peaks[schedule] = [f.peak_bytes for f in simulate(program.dag, program.plans).devices.values()]
    assert all(a < b for a, b in zip(peaks["one_f_one_b"], peaks["gpipe"], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_what_remains_is_what_was_handed_out(name: str) -> None:
    program = compiled(name, [*place(captured(name).step, 2), *split(3)])
    result = simulate(program.dag, program.plans, network=Network(Link(0.5, 100.0)))
    for device, figures in result.devices.items():
        updates = [n for n in program.dag.of_type(Update) if device in n.devices]
        assert figures.memory[-1][1] == sum(program.dag.value(u.inputs[0]).nbytes for u in updates)
        assert figures.in_flight[-1][1] == 0
        assert all(n >= 0 for _, n in (*figures.memory, *figures.in_flight))
        for curve in (figures.memory, figures.in_flight):
            assert [t for t, _ in curve] == sorted(t for t, _ in curve)


def test_kinds_of_memory_add_up_to_all_of_it() -> None:
    shards = dict.fromkeys(("shard_params", "shard_grads", "shard_optimizer"), True)
    replicate = {"op": "replicate", "filter": {}, "devices": [0, 1], **shards}
    plan = compiled("mlp", [{"op": "place", "filter": {}, "devices": [0, 1]}, replicate, *split(2)])
    for figures in simulate(plan.dag, plan.plans, network=Network(Link(0.5))).devices.values():
        assert set(figures.memory_by_kind) == {
            "activations",
            "gradients",
            "gathered",
            "workspace",
            "other",
            "host",
        }
        for moment in {t for t, _ in figures.memory}:
            levels = [[n for t, n in curve if t <= moment][-1] for curve in figures.memory_by_kind.values()]
            assert sum(levels) == [n for t, n in figures.memory if t <= moment][-1]
        peaks = {kind: max(n for _, n in curve) for kind, curve in figures.memory_by_kind.items()}
        assert peaks["gathered"] > 0 and peaks["gradients"] > 0 and peaks["activations"] > 0
        assert figures.memory_by_kind["gathered"][-1][1] == 0 == figures.memory_by_kind["activations"][-1][1]
