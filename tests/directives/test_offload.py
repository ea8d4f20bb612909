"""Saved values of forward passes in host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_piper as piper
from lightning_piper import Offload, Order, Place, Recompute, Replicate, schedules
from lightning_piper.errors import DirectiveError, VerificationError
from lightning_piper.holdings.host_states import HostStates
from lightning_piper.ir.nodes import Chunk
from lightning_piper.ops.host import Fetch, HostPool, Store
from lightning_piper.plan.instructions import HostCopy, Run
from lightning_piper.simulate import Link, Network, simulate
from lightning_piper.testing import Case, directive_suite
from lightning_piper.verify import Report
from tests import ring
from tests.axes import EXPERTS, HEADS, columns, everywhere, sparse
from tests.dags import Fixed
from tests.directives.test_recompute import ONE, PROGRAMS, SPLIT, TWO, again
from tests.groups import marked
from tests.tensors import compiled_for, decoder, far, fit, grid, report_of

Figures = dict[str, Any]
LAYER_1 = {"LAYER": 1, "MB": 0, "PASS": "B"}


def off(ahead: Any = 1, **chosen: Any) -> Offload:
    return Offload(filter=chosen, ahead=ahead)


def verified(report: Report) -> None:
    own = next(row for row in report.rows if row.name == "offload")
    assert report.verdict == "verified" and own.before.verdict == "bitwise equal", str(report)


def peaks(program: Any, network: Network | None = None) -> tuple[int, int]:
    """Return the peak bytes of the first device, and of its host."""
    compiled = compiled_for(program)
    figures = simulate(compiled.dag, compiled.plans, network=network).devices[0]
    return figures.peak_bytes, max(n for _, n in figures.memory_by_kind["host"])


def test_less_is_kept_on_the_device():
    before, nothing = peaks([ONE, SPLIT])  # with gradients, and what passes need for themselves
    device, host = peaks([ONE, SPLIT, off()])
    assert nothing == 0 and device < 0.7 * before and before < device + host
    both, less = peaks([ONE, SPLIT, again(), off()])
    assert both < device and less < 0.1 * host  # of recomputed layers, their inputs


def test_sooner_fetched_is_longer_kept():
    sizes = [peaks([ONE, SPLIT, off(ahead)])[0] for ahead in (0, 1, 2, 64)]
    assert sizes == sorted(sizes) and len(set(sizes)) > 2


def issued_between(program: Any) -> set[int]:
    """Return the numbers of chunks that are issued between a fetch and its reader."""
    compiled = compiled_for(program)
    instructions = compiled.plans[0].instructions
    found = set()
    for fetch in compiled.dag.of_type(Fetch):
        reader = compiled.dag.users(fetch)[0].id
        ids = [i.node for i in instructions if isinstance(i, Run | HostCopy)]
        between = ids[ids.index(fetch.id) : ids.index(reader)]
        found.add(sum(isinstance(compiled.dag.nodes[i], Chunk) for i in between))
    return found


def test_it_is_fetched_in_time():
    assert issued_between([ONE, SPLIT, off(0)]) == {0}
    assert issued_between([ONE, SPLIT, off(2)]) == {2}
    (distance,) = issued_between([ONE, SPLIT, off({"LAYER": 3, "MB": 0, "PASS": "B"}, LAYER=1, MB=0)])
    assert distance == 2


def named(what: str, layer: int) -> dict[str, Any]:
    return {"LAYER": layer, "MB": 0, "PASS": what}


def test_an_order_names_what_is_fetched_and_stored():
    one = off(64, LAYER=1, MB=0)
    sooner = Order(filters=[named("FETCH", 1), named("B", 3)])
    later = Order(filters=[named("B", 3), named("FETCH", 1), named("B", 2)])
    assert issued_between([ONE, SPLIT, one, later]) == {1} != issued_between([ONE, SPLIT, one])
    assert issued_between([ONE, SPLIT, off(0, LAYER=1, MB=0), sooner]) == {2}
    program = [ONE, SPLIT, one, Order(filters=[named("F", 3), named("STORE", 1), named("B", 3)]), later]
    compiled = compiled_for(program)
    ids, dag = [i.node for i in compiled.plans[0].instructions], compiled.dag
    chunks = {(c.tags["LAYER"], c.tags["MB"], c.tags["PASS"]): ids.index(c.id) for c in dag.of_type(Chunk)}
    stores = [ids.index(store.id) for store in dag.of_type(Store)]
    assert stores and all(chunks[3, 0, "F"] < at < chunks[3, 0, "B"] for at in stores)
    verified(report_of(program))


def test_copies_take_time_beside_chunks():
    """Of a slow link the step waits; of a fast one it does not."""
    compiled = compiled_for([ONE, SPLIT, off()])
    steps = [
        simulate(compiled.dag, compiled.plans, network=Network(host=Link(bandwidth=b))).step_time
        for b in (None, 10**7, 10**3)
    ]
    assert steps[0] == simulate(compiled.dag, compiled.plans).step_time == 24
    assert steps[1] < 24.1 < 40 < steps[2]


WITH = [name for name in PROGRAMS if name != "sequences"]


@pytest.mark.parametrize("name", marked(WITH, ["halves first", "axes"]))
def test_it_goes_with_all_else(name):
    verified(report_of([off() if isinstance(each, Recompute) else each for each in PROGRAMS[name]]))


@pytest.mark.parametrize(
    "program",
    [
        [off()],
        [off(), ONE],
        [
            off(LAYER=2),
            Place(filter={"LAYER": [0, 1]}, devices=[0]),
            Place(filter={"LAYER": [2, 3]}, devices=[1]),
        ],
    ],
    ids=str,
)
def test_a_place_may_follow(program):
    verified(report_of(program))


def test_experts_and_second_passes():
    program = [
        grid(ep=2, tp=2),
        columns(params=HEADS),
        EXPERTS,
        everywhere(4, shard_params=True),
        again(),
        off(),
    ]
    verified(report_of(program, sparse))


@pytest.mark.parametrize("schedule", marked(["gpipe", "one_f_one_b", "zero_bubble"], ["zero_bubble"]))
def test_stages(schedule):
    stages = getattr(schedules, schedule)(stages=2, microbatches=4)
    verified(ring.report_of([*stages, off(3)]))
    verified(ring.report_of([*stages, again(PP=0), off()]))


def test_halves_of_a_backward_pass_keep_something_too():
    program = [*schedules.zero_bubble(stages=2, microbatches=4), Offload(filter={"PASS": ["F", "BI"]})]
    verified(ring.report_of(program))
    dag = ring.compiled_for(program).dag
    assert {dag.nodes[store.inputs[0][0]].tags["PASS"] for store in dag.of_type(Store)} == {"F", "BI"}


def test_one_store_serves_all_readers():
    """A region's input that two later passes read is stored once."""
    dag = ring.compiled_for([*schedules.gpipe(stages=2, microbatches=4), again(), off()]).dag
    stored = [store.inputs[0] for store in dag.of_type(Store)]
    assert len(stored) == len(set(stored)) > 0


def lame(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    original = Offload.apply

    def apply(self: Any, dag: Any) -> None:
        original(self, dag)
        spoil(dag, list(dag.of_type(Store)), list(dag.of_type(Fetch)))

    monkeypatch.setattr(Offload, "apply", apply)


def swap(dag: Any, one: Any, other: Any) -> None:
    dag.substitute(dag.users(one)[0], (one.id, 0), (other.id, 0))


SPOILED: dict[str, Any] = {
    "another microbatch's": lambda dag, stores, fetches: dag.rewire(fetches[0], inputs=fetches[1].inputs),
    "read on the host": lambda dag, stores, fetches: dag.substitute(
        dag.users(fetches[0])[0], (fetches[0].id, 0), (stores[0].id, 0)
    ),
    "not stored": lambda dag, stores, fetches: dag.rewire(fetches[0], inputs=stores[0].inputs),
    "elsewhere": lambda dag, stores, fetches: dag.change(fetches[0], devices=(1,)),
    "something else": lambda dag, stores, fetches: dag.change(stores[0], outputs=stores[1].outputs),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_is_wrong_is_found(name, monkeypatch):
    lame(monkeypatch, SPOILED[name])
    with pytest.raises(VerificationError, match=r"store|fetch|saved"):
        compiled_for([ONE, SPLIT, off(LAYER=2)])


@pytest.mark.parametrize(
    "program, expected",
    [
        ([ONE, off(-1)], "Give a number of chunks from 0 to 64"),
        ([ONE, off(True)], "Give a number of chunks"),
        ([ONE, off("soon")], "Give a number of chunks"),
        ([ONE, off({"LAYER": 9})], "matches nothing"),
        ([ONE, off({"LAYER": 0, "PASS": "F"})], "runs before the values to fetch have been stored"),
        ([ONE, Offload(filter={}, store_stream="")], "is not a stream"),
        ([ONE, Offload(filter={}, saved=False)], "moves nothing. Give True for at least one of them"),
        ([ONE, Offload(filter={}, saved=1)], "field 'saved': 1 is not a Boolean. Give True or False"),
        (
            [ONE, Offload(filter={}, states="yes")],
            "field 'states': 'yes' is not a Boolean. Give True or False",
        ),
        ([ONE, off(PASS="B")], r"the selected passes \(such as B\[.*\]\) save nothing for a backward pass"),
        (
            [ONE, again(), off(LAYER=1), off(LAYER=0)],
            r"the selected passes \(such as F\[.*\]\) save nothing for a",
        ),
        ([ONE, off(), off()], "directive 1 already offloads the values that the selected passes save"),
        (
            [ONE, SPLIT, Order(filters=[{"PASS": "FETCH"}, LAYER_1])],
            "PASS: FETCH} matches nothing. Add an offload of these chunks",
        ),
        (
            [ONE, SPLIT, off(), Order(filters=[LAYER_1, {**LAYER_1, "PASS": "FETCH"}])],
            "this order closes a cycle",
        ),
        (
            [ONE, SPLIT, off(), Order(filters=[[LAYER_1, {"PASS": "STORE"}], {"PASS": "B"}])],
            "this group has a filter of copies .* Give the filter of copies its own group",
        ),
        (
            [ONE, SPLIT, off(), Order(filters=[{"PASS": "STORE"}, {"PASS": "FETCH"}])],
            r"this group and filters\[0\] both select copies .* Put a group of chunks between them",
        ),
        ([ONE, SPLIT, off(), Order(filters=[{"PASS": ["B", "FETCH"]}, LAYER_1])], "or STORE or FETCH alone"),
        ([ONE, off(), off(PASS="FETCH")], "PASS 'FETCH' is unknown"),
        (
            [ONE, off(), Fixed(), SPLIT],
            "directive 1 offloads the values that .* saves. Move this directive before the offload",
        ),
        (
            [ONE, off(), Fixed(), again()],
            "directive 1 offloads the values that .* saves. Move this directive before the offload",
        ),
        ([TWO, off(), Place(filter={}, devices=[0])], "already on device"),
        (
            [*PROGRAMS["columns"][:1], off(), Fixed(), *PROGRAMS["columns"][1:-1]],
            r"directive 1 \(offload\) already offloads saved values, whose shapes would change. Move this "
            "directive before directive 1",
        ),
    ],
)
def test_what_cannot_be_is_refused(program, expected):
    with pytest.raises(DirectiveError, match=expected):
        compiled_for(program)


@pytest.mark.parametrize("directive", [off(MB=3), Offload(filter={"MB": 3}, states=True), again(MB=3)])
def test_a_smaller_batch_without_the_microbatch_has_nothing_to_move(directive):
    compiled = compiled_for([ONE, piper.Split(num_microbatches=4), directive])
    moved = [node.tags["MB"] for node in compiled.dag.nodes.values() if _moves(node)]
    assert set(moved) == ({3} if moved else set()) and bool(moved or compiled.dag.hosted)
    assert not any(_moves(node) for node in compiled.at(3).dag.nodes.values())


def _moves(node: Any) -> bool:
    return isinstance(node, Store | Fetch) or node.tags.get("PASS") == "R"


def test_trainings_are_those_of_one_device():
    module, other, less = decoder(), decoder(), decoder()
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    program = [TWO, Replicate(filter={}, devices=[0, 1], shard_params=True), again(LAYER=2), off()]
    fit(module, piper.PiperStrategy(program, transport="local"), max_epochs=2, **options)
    fit(other, "auto", max_epochs=2, **options)
    fit(less, "auto", max_epochs=1, **options)
    assert far(module, other) < 1e-12 < 1e-6 < far(less, other)


@pytest.mark.parametrize("level", [{}, {"shard_optimizer": True}, {"shard_params": True}], ids=str)
@pytest.mark.parametrize("part", marked([1, 2**30], [1]))
def test_states_wait_on_the_host(level, part, monkeypatch):
    """They are there for the update of their part alone; and what is trained is the same."""
    module, other, less = decoder(), decoder(), decoder()
    on_device, whole = [], []
    bring, after = HostStates._bring, HostStates._after

    def spy(self: Any) -> None:
        bring(self)
        state = self._optimizer.optimizer.state
        on_device.append(
            sum(state[p][key].nbytes for (p, key), room in self._room.items() if state[p][key] is not room)
        )
        whole.append(self.nbytes)

    def seen(self: Any, optimizer: Any, *args: Any) -> None:
        after(self, optimizer, *args)
        assert all(optimizer.state[p][key] is room for (p, key), room in self._room.items()) and self._room

    monkeypatch.setattr(HostStates, "_bring", spy)
    monkeypatch.setattr(HostStates, "_after", seen)
    monkeypatch.setattr("lightning_piper.holdings.host_states.PART", part)
    program = [
        TWO,
        Replicate(filter={}, devices=[0, 1], **level),
        Offload(filter={"LAYER": [1, 2]}, saved=False, states=True),
    ]
    fit(module, piper.PiperStrategy(program, transport="local"), max_epochs=2)
    fit(other, "auto", max_epochs=2)
    fit(less, "auto", max_epochs=1)
    assert far(module, other) < 1e-12 < 1e-6 < far(less, other)
    assert 0 < max(on_device) < 0.5 * max(whole) if part == 1 else max(on_device) == max(whole)


def test_hooks_and_schedules_see_one_step(monkeypatch):
    """Of all parameters, though they are updated part by part; and so when a step fails in the middle."""
    monkeypatch.setattr("lightning_piper.holdings.host_states.PART", 1)
    module, other, seen = decoder(), decoder(), []

    def scheduled(self: Any) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(
            lambda o, *_: seen.append(sum(len(group["params"]) for group in o.param_groups))
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    monkeypatch.setattr(type(module), "configure_optimizers", scheduled)
    program = [ONE, Offload(filter={}, saved=False, states=True)]
    trainer = fit(module, piper.PiperStrategy(program, transport="local"), max_epochs=2)
    assert seen == [len(list(module.parameters()))] * trainer.global_step
    fit(other, "auto", max_epochs=2)
    assert far(module, other) < 1e-12
    (optimizer,) = trainer.optimizers
    monkeypatch.setattr(HostStates, "_store", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert len(optimizer.param_groups[0]["params"]) == seen[0]


def offloads(case: Case, dag: Any) -> st.SearchStrategy[Offload]:
    stages = sorted({chunk.tags["PP"] for chunk in dag.of_type(Chunk) if "PP" in chunk.tags}, key=str)
    filters = st.sampled_from([{}, *({"PP": stage} for stage in stages)])
    return st.builds(lambda chosen, ahead: Offload(filter=chosen, ahead=ahead), filters, st.integers(0, 3))


TestOffload = directive_suite(Offload, offloads)


# The pool


@st.composite
def bundles(draw: Any) -> list[torch.Tensor]:
    """Draw tensors as passes save them: views of some storages, with holes, transposed, expanded, or empty."""
    found: list[torch.Tensor] = []
    for _ in range(draw(st.integers(1, 3))):
        base = torch.arange(
            24.0, dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.int64]))
        ).view(2, 3, 4)
        views = {
            "itself": base, "turned": base.transpose(0, 2), "columns": base[..., 1:3], "a row": base[1],
            "empty": base[:0],
            "expanded": base[:1].expand(5, 3, 4), "windows": base.view(-1).unfold(0, 4, 2),
            "a number": base[1, 1, 1],
            "bits": base.view(torch.uint8),
        }  # fmt: skip
        found += [
            views[name] for name in draw(st.lists(st.sampled_from(list(views)), min_size=1, max_size=4))
        ]
    return found


@given(bundles())
@settings(deadline=None)
def test_what_comes_back_is_what_was_stored(bundle):
    pool = HostPool(torch.device("cpu"))
    before = [x.clone() for x in bundle]
    stored = pool.store(bundle)
    for x in bundle:
        if x._base is None and x.numel():
            x.zero_()  # and so its views
    for last in (False, True):
        for x, old, new in zip(bundle, before, pool.fetch(stored, last=last), strict=True):
            assert torch.equal(old, new) and new.stride() == x.stride() and new.dtype == x.dtype


def test_views_of_one_storage_share_it_again():
    base = torch.arange(12.0)
    one, other = HostPool(torch.device("cpu")).fetch(
        HostPool(torch.device("cpu")).store([base[2:8], base[4:]]), last=True
    )
    one[2] = -1
    assert other[0] == -1 and one.untyped_storage().nbytes() == 48


def test_room_is_used_again():
    pool = HostPool(torch.device("cpu"))
    for _ in range(3):
        first, second = pool.store([torch.ones(10)]), pool.store([torch.zeros(10)])
        assert pool.fetch(first, last=False)[0].sum() == pool.fetch(first, last=True)[0].sum() == 10
        assert pool.fetch(second, last=True)[0].sum() == 0
    assert pool.nbytes == 80  # of ten numbers each
