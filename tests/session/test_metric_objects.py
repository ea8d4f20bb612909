"""Which processes update a metric object, and which of them receive its values. The other processes are
replaced by given values.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.wrappers import MetricTracker

from lightning_piper.capture import BatchSpec
from lightning_piper.errors import PiperError
from lightning_piper.ir.metric_calls import Derived, MetricCall, MetricCalls, MetricLog, MetricResult
from lightning_piper.processes.world import World
from lightning_piper.session.metric_objects import (
    Gather,
    MetricObjects,
    add_metric_states,
    metric_states,
    restore_metric_states,
    wanted_by_all,
)
from lightning_piper.session.replay import Given


class Told(World):
    """The world of one process of several. What the others would send is this process's own value; `asked`
    lists what it has been asked for.
    """

    def __init__(self, rank, replicas):
        super().__init__(rank, len(replicas), torch.device("cpu"), replicas=replicas)
        self.asked, self.sent = [], None

    def group_of(self, ranks):
        self.asked.append(("group", tuple(ranks)))

    def broadcast(self, value, source=0):
        self.asked.append(("broadcast", source))
        return self.sent if value is None else value

    def gather(self, value, ranks=None):
        self.asked.append(("gather", ranks))
        return [value] * (self.size if ranks is None else len(ranks))


class Count(nn.Module):
    def update(self, x):
        self.seen = len(x)

    def compute(self):
        return self.seen

    def reset(self):
        self.seen = 0


def module(**metrics):
    found = nn.Module()
    for name, metric in metrics.items():
        found.add_module(name, metric)
    return found


def call(name, method="forward"):
    return MetricCall(name, method, lambda tensors, given: (tuple(tensors), {}), ("x",), 0, "train.py:1")


def test_only_owners_update():
    for rank, updated in ((0, False), (1, True)):
        world, net = Told(rank, (0, 0)), module(mean=MeanMetric())
        objects = MetricObjects(world)
        objects.claim(net, {"mean": (1,)})
        objects.call(net, call("mean"), [torch.ones(()) if updated else None], None, wanted=False)
        assert (float(net.mean.weight) > 0) == updated and world.asked == [("group", (1,))] * updated
        assert net.mean.update_count == 1  # also where it was not


def test_all_get_what_the_first_owner_has():
    world, net = Told(0, (0, 0)), module(mean=MeanMetric())
    objects = MetricObjects(world)
    objects.claim(net, {"mean": (1,)})
    world.sent = torch.tensor(5.0), {"": torch.tensor(5.0)}
    assert objects.call(net, call("mean"), [None], None, wanted=True) == 5 and net.mean._forward_cache == 5
    world.sent = torch.tensor(7.0)
    assert net.mean.compute() == 7 and world.asked[-1] == ("broadcast", 1)
    world.sent = [None, {"mean_value": torch.tensor(3.0), "weight": torch.tensor(1.0), "_update_count": 2}]
    world.gather = lambda value: world.sent
    objects.release()
    net.mean.distributed_available_fn = lambda: False
    assert net.mean.compute() == 3 and net.mean.update_count == 2  # as if it had seen what the owner has


def test_replicas_sync_among_owners():
    world, net = Told(1, (0, 0, 1, 1)), module(sum=SumMetric())
    net.sum.dist_sync_fn, net.sum.distributed_available_fn = Gather(world), lambda: True
    objects = MetricObjects(world)
    objects.claim(net, {"sum": (1, 3)})
    assert (
        objects.call(net, call("sum"), [torch.tensor(2.0)], None, wanted=True) == 4
    )  # two replicas have the same here
    assert world.asked[1:] == [("gather", (1, 3)), ("broadcast", 1)]
    net.sum._computed = None
    assert net.sum.compute() == 4 and net.sum.sum_value == 2
    assert objects.call(net, call("sum"), [torch.tensor(2.0)], None, wanted=False) == 2  # nobody needs it
    objects.release(failed=True)
    assert "compute" in vars(net.sum) and net.sum.dist_sync_fn._owners is None


def test_parts_of_a_collection_are_claimed_once():
    world, net = Told(0, (0, 0)), module(some=MetricCollection({"a": MeanMetric(), "b": SumMetric()}))
    objects = MetricObjects(world)
    objects.claim(net, {"some": (1,), "some.a": (1,)})
    computes = [net.some["a"].compute, net.some["b"].compute]
    objects.claim(net, {"some": (1,)})
    assert [net.some["a"].compute, net.some["b"].compute] == computes
    with pytest.raises(
        PiperError, match=r"self.some.a is updated on device 0 in one method .*, and on device 1 in another"
    ):
        objects.claim(net, {"some.a": (0,)})


def test_what_an_object_gets_later_is_claimed_then():
    tracker = MetricTracker(MeanMetric(), maximize=False)
    objects, net = MetricObjects(Told(0, (0, 0))), module(tracked=tracker)
    tracker.increment()
    objects.claim(net, {"tracked": (1,)})
    tracker.increment()
    compute = tracker[-1].compute
    objects.claim(net, {"tracked": (1,)})
    assert tracker[-1].compute != compute
    compute = tracker[-1].compute
    objects.claim(net, {"tracked": (1,)})
    assert tracker[-1].compute == compute


def test_what_cannot_be_merged_is_refused_with_replicas():
    MetricObjects(Told(0, (0, 0))).claim(module(count=Count()), {"count": (1,)})
    with pytest.raises(
        PiperError,
        match=r"Count has no states that Piper can merge over the 2 replicas\. Derive it from torchmetrics",
    ):
        MetricObjects(Told(0, (0, 1))).claim(module(count=Count()), {"count": (0, 1)})


class OfANetwork(SumMetric):
    def __init__(self, net):
        super().__init__()
        self.net = net


def test_a_network_that_is_elsewhere_is_refused():
    for device, rank in (("cpu", 1), ("meta", 0)):  # rank 0 does not update it
        MetricObjects(Told(rank, (0, 0))).claim(
            module(score=OfANetwork(nn.Linear(2, 2, device=device))), {"score": (1,)}
        )
    with pytest.raises(
        PiperError,
        match=r"self.score uses net.weight, which is a part of the model and is on another rank .* its own "
        r"copy of the network",
    ):
        MetricObjects(Told(1, (0, 0))).claim(
            module(score=OfANetwork(nn.Linear(2, 2, device="meta"))), {"score": (1,)}
        )


def test_an_error_says_which_call_it_was():
    net = module(mean=MeanMetric())
    with pytest.raises(Exception) as caught:
        MetricObjects(Told(0, (0,))).call(net, call("mean"), ["no number"], None, wanted=False)
    assert caught.value.__notes__ == [
        "raised by self.mean.forward, which train.py:1 calls, after the step has run"
    ]


@pytest.mark.parametrize(
    "log, step, wanted",
    [
        (MetricLog("m", "some", {}, 0), "training_step", {0}),
        (MetricLog("m", "some", {}, 0), "validation_step", set()),
        (MetricLog("m", "some", {"on_step": True}, 0), "validation_step", {0}),
        (MetricLog("m", "some.a", {}, 0), "training_step", {0}),
        (MetricLog("m", "something", {}, 0), "training_step", set()),
        (MetricLog("m", "some", {"on_step": False}, 0), "training_step", set()),
    ],
)
def test_values_that_all_processes_need(log, step, wanted):
    assert wanted_by_all(MetricCalls((call("some"), log)), step) == wanted
    assert wanted_by_all(MetricCalls((call("some"), log), used=frozenset({0})), step) == {0}
    assert MetricResult(0, ("a", 1)).of([{"a": [1, 2]}]) == 2


def test_what_a_call_does_not_give_is_named():
    given = Given(BatchSpec(None, (), ()), [])
    given.keep(call("some"), {"a": 1.0, "b_0": 2.0})
    assert given(MetricResult(0, ("a",))) == 1
    with pytest.raises(
        PiperError,
        match=r"self.some returned a dict of 'a', 'b_0', but the step uses \['b'\] of it \(KeyError: 'b'\)",
    ):
        given(MetricResult(0, ("b",)))
    with pytest.raises(
        PiperError,
        match=r"self.some returned a dict of 'a', 'b_0', but the step calculates with an entry of it \(TypeError",
    ):
        given(Derived("add", operator.add, (MetricResult(0), 1)))
    assert given(Derived("add", operator.add, (MetricResult(0, ("a",)), 1))) == 2


class AllStates(Metric):
    """Has a state of each kind."""

    def __init__(self, first):
        super().__init__()
        for name in ("sum", "mean", "max", "min"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx=name)
        self.add_state("cat", [], dist_reduce_fx="cat")
        self.update(torch.tensor(first))

    def update(self, x):
        self.sum, self.mean, self.max, self.min = self.sum + x, self.mean + x, self.max + x, self.min - x
        self.cat.append(x.reshape(1))

    def compute(self):
        return [self.sum, self.mean, self.max, self.min, self.cat.sort().values]


def synced(metrics):
    """The result of one of some metrics, each on a process of its own."""
    metric = metrics[0]
    found = iter(list(zip(*(states_of(each) for each in metrics), strict=True)))
    with metric.sync_context(
        dist_sync_fn=lambda state, group: list(next(found)), distributed_available=lambda: True
    ):
        return [x.tolist() for x in AllStates.compute(metric)]


def states_of(metric):
    return [
        torch.cat(x) if isinstance(x, list) else x
        for x in (getattr(metric, name) for name in metric._defaults)
    ]


@pytest.mark.parametrize("adds", [True, False])
def test_the_states_of_lost_processes_are_in_the_result_of_the_others(adds):
    """Two of four processes are lost."""
    metrics = [AllStates(x) for x in (1.0, 2.0, 4.0, 9.0)]
    wanted = synced(metrics)
    states = [metric_states(module(metric=metric)) for metric in metrics]
    for rank in (0, 1):
        own = module(metric=metrics[rank])
        if adds:
            add_metric_states(own, states[rank], states[2:], left=2, is_first=rank == 0)
        restore_metric_states(own, states[rank])
    assert (synced(metrics[:2]) == wanted) == adds
    assert metrics[0].update_count == (3 if adds else 1)


def test_a_metric_object_keeps_the_dtype_of_its_arguments() -> None:
    """Its state is float32, so the dtype in which it adds up arguments decides how they are rounded."""
    module, other = (nn.ModuleDict({"mean": MeanMetric()}) for _ in range(2))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module["mean"].to("cpu")  # as Lightning's `log` does
    finally:
        torch.set_default_dtype(before)
    assert (module["mean"].dtype, other["mean"].dtype) == (torch.float64, torch.float32)
    restore_metric_states(other, metric_states(module))
    assert other["mean"].dtype == torch.float64
