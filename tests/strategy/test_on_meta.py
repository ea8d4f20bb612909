"""Modules on the meta device: their initial values do not depend on the process that computes them, and no
process holds more than its part.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import lightning_piper as piper
from lightning_piper.holdings.materialization import initialize, load_state, places_of
from tests.distributed.processes import launch_trainings
from tests.strategy import on_meta
from tests.strategy.fitting import same
from tests.strategy.on_meta import Configured, Hooked, Job, Net, fit
from tests.strategy.scenarios import equal

TRAINED = [
    Job("zero3", save="parts.ckpt", sharded=True),
    Job("zero2", "pp2 dp2 zero2", save="whole.ckpt"),
    Job("replicas", "pp2 dp2", again=True),
    Job("configured", build=Configured),
    Job("hooked", "pp2 dp2 zero2", Hooked),
    Job("checked", "pp2 dp2 zero2", checked=True),
]
LOADED = [
    Job("from parts", "pp2 dp2", ckpt="parts.ckpt", seed=4, steps=4),
    Job("from whole", ckpt="whole.ckpt", seed=4, steps=4),
    Job("from parts again", ckpt="parts.ckpt", seed=5, steps=4, checked=True),
]
REFUSED = [
    Job("verified", verify="first_batch"),
    Job("mixed", mixed=True),
    Job("at its end", ckpt="parts.ckpt"),
    Job("early", early=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("meta")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each rank has seen of each job."""
    return launch_trainings(
        4, on_meta.train, folder / "run", [*TRAINED, *LOADED, *REFUSED], folder, prepare=on_meta.trace_all
    )


@pytest.fixture(scope="module")
def one(folder):
    """What one process has seen of each job."""
    return {job.name: fit(dataclasses.replace(job, save="", ckpt=""), folder) for job in TRAINED}


@pytest.mark.parametrize("name", [job.name for job in TRAINED])
def test_all_placements_begin_and_end_with_the_same_bits(ranks, one, name):
    assert "error" not in ranks[0][name], ranks[0][name]
    assert same(ranks[0][name]["initial"], one[name]["initial"])
    assert same(ranks[0][name]["values"], one[name]["values"])
    for rank in ranks:
        assert equal(rank[name]["losses"], one[name]["losses"])
    assert one["zero2"]["losses"][0] != one["hooked"]["losses"][0]
    assert same(one["zero2"]["initial"], one["checked"]["initial"])


def test_other_programs_begin_with_the_same_bits(one, folder):
    alike = [one[name]["initial"] for name in ("zero3", "zero2", "replicas")]
    alike.append(fit(Job("pp2", "pp2"), folder)["initial"])
    alike.append({n.removeprefix("net."): x for n, x in one["configured"]["initial"].items()})
    random = [n for n in alike[0] if n.startswith("scaled.")]  # a module in another one has another name
    for other in alike[1:-1]:
        assert same(alike[0], other)
    assert all(not torch.equal(alike[0][n], alike[-1][n]) for n in random)
    other_seed = fit(Job("seed", "pp2", seed=4), folder)["initial"]
    assert all(not torch.equal(alike[0][n], other_seed[n]) for n in random)


def test_a_process_has_its_part_during_and_after_the_fit(ranks, one):
    whole = one["zero3"]["elements"]
    assert (
        sum(rank["zero3"]["elements"] for rank in ranks) == whole + 88
    )  # the tied weight, 11 x 8, is on both stages
    assert all(
        rank["zero3"]["missing"] == 12 for rank in ranks
    )  # and what rank 0 saved afterwards was whole, see below
    assert all(0 < rank["replicas"]["missing"] < 12 for rank in ranks)
    assert {mark for rank in ranks for mark in rank["zero3"]["marks"]} == {True, False}


def test_the_next_fit_goes_on_with_what_was_trained(ranks, one):
    assert same(ranks[0]["replicas"]["again"], ranks[0]["replicas"]["values"])
    assert same(one["replicas"]["again"], one["replicas"]["values"])


def test_checkpoints_load_into_parts(ranks):
    for name, source in (("from parts", "zero3"), ("from parts again", "zero3"), ("from whole", "zero2")):
        assert "error" not in ranks[0][name], ranks[0][name]
        assert same(ranks[0][name]["initial"], ranks[0][source]["values"])
        assert not same(ranks[0][name]["values"], ranks[0][source]["values"])
        assert all(rank[name]["missing"] > 0 for rank in ranks)


def test_divided_experts_begin_with_the_same_bits(ranks):
    one = on_meta.experts("ep2 dp2 zero3")
    assert same(ranks[0]["experts"]["initial"], one["initial"])
    unused = (
        one["initial"]["shared.weight"].numel() + one["initial"]["shared.bias"].numel()
    )  # whole in each of four processes
    assert sum(rank["experts"]["elements"] for rank in ranks) == one["elements"] + 3 * unused
    for rank in ranks:
        assert equal(rank["experts"]["losses"], one["losses"])


def test_validation_without_a_fit(ranks, folder):
    """Over processes the loss is the mean of the two halves; in one, here, that of the first one."""
    fresh, loaded = ranks[0]["validated"]
    assert all(rank["validated"] == [fresh, loaded] for rank in ranks)
    first = on_meta.validate(folder)
    second = on_meta.validate(folder, half=1)
    assert [(a + b) / 2 for a, b in zip(first, second, strict=True)] == pytest.approx(
        [fresh, loaded], rel=1e-6
    )
    assert abs(fresh - loaded) > 0.1


def test_refusals_over_processes(ranks):
    for rank in ranks:
        assert "is on the meta device. Use verify='static'" in rank["verified"]["error"]
        assert "is on the meta device on rank 0, but has values on rank 1" in rank["mixed"]["error"]
        assert (
            "because the previous run had no step and so did not load its checkpoint. Pass ckpt_path to "
            "this run as well" in rank["at its end"]["error"]
        )
        assert "has no values to save before the first step" in rank["early"]["error"]


def drawn(module, names=None, seed=7):
    found = {}
    places = places_of(module)
    initialize(
        module,
        places,
        places if names is None else names,
        seed,
        lambda name, value: found.update({name: value.clone()}),
    )
    return found


def on_the_meta_device(build):
    with torch.device("meta"):
        return build()


def test_values_depend_on_names_and_seed_alone():
    module = on_the_meta_device(Net)
    found = drawn(module)
    assert "head.weight" not in found and found.keys() >= {"embedding.weight", "head.bias", "scaled.order"}
    assert (
        not found["scaled.mix"].is_contiguous() and found["scaled.mix"].stride() == module.scaled.mix.stride()
    )
    for name in found:
        assert torch.equal(drawn(module, {name})[name], found[name])
    two = drawn(on_the_meta_device(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))))
    assert not torch.equal(two["0.weight"], two["1.weight"])
    assert not torch.equal(drawn(module, seed=8)["scaled.mix"], found["scaled.mix"])
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn(module)
    assert torch.equal(torch.rand(3), expected)
    assert all(x.is_meta != name.startswith("whole.") for name, x in module.named_parameters())


class Partial(nn.Module):
    """A layer whose `reset_parameters` does not set the mask."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

    def reset_parameters(self):
        nn.init.zeros_(self.weight)


class Replacing(Partial):
    def reset_parameters(self):
        self.weight = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize("kind, message", [
    (Partial, "'1.mask' is on the meta device, and initializing submodule '1' .Partial. leaves it without "
              "values"),
    (Replacing, "has replaced the tensor '1.weight'"),
])  # fmt: skip
def test_what_is_not_initialized_is_refused(kind, message):
    module = on_the_meta_device(lambda: nn.Sequential(nn.Linear(2, 2), kind()))
    with pytest.raises(piper.PiperError, match=message):
        drawn(module)
    assert all(x.is_meta for x in [*module.parameters(), *module.buffers()])


def test_a_state_dict_for_a_module_on_the_meta_device():
    source, module = Net(), on_the_meta_device(Net)
    module.embedding.double()  # a value is stored as it comes, and converted where it is put
    tensors = [*module.parameters(), *module.buffers()]
    found = load_state(module, source.state_dict(), strict=True)
    assert found.keys() == {
        n for n, x in [*module.named_parameters(), *module.named_buffers()] if x.is_meta
    } - {"scaled.order"}
    assert all(a is b for a, b in zip(tensors, [*module.parameters(), *module.buffers()], strict=True))
    assert torch.equal(module.whole.weight, source.whole.weight)
    assert torch.equal(found["embedding.weight"], source.embedding.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        load_state(module, {**source.state_dict(), "head.bias": torch.zeros(3)}, strict=True)
