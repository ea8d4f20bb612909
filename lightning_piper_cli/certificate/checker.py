"""Verify a certificate: that the plans compute what the step computes on one device.

This package shares no code with `lightning_piper` and needs only Python. `lightning_piper.certificate` writes certificates.

    python -m lightning_piper_cli.certificate.checker FILE
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise, product, zip_longest
from pathlib import Path
from typing import Any

from lightning_piper_cli.certificate.memory import COLLECTIVES, DeviceMemory, Fault, Json, need
from lightning_piper_cli.certificate.operations import Operations
from lightning_piper_cli.certificate.rules import changed, shape_of, with_shape

FORMAT = "lightning-piper certificate 1"
FIX = "Give a file that `lightning-piper check --certificate` of this version has written"
Share = list[Any]  # [value of the program, coordinates of the term, first sample, sample after the last one]


def joined(shares: Iterable[Share]) -> list[Share]:
    """Return shares of the batch in order, adjacent ones as one. No share may count twice."""
    found: list[Share] = []
    for value, at, start, stop in sorted(shares):
        if found and found[-1][:2] == [value, at] and start <= found[-1][3]:
            need(start == found[-1][3], f"samples {start}:{found[-1][3]} of {value} {at} count twice")
            found[-1] = [value, at, found[-1][2], stop]
        else:
            found.append([value, at, start, stop])
    return found


def coordinate(mesh: Json, axis: str, rank: int) -> int:
    """Return the position of a group rank along an axis of a mesh; 0 if the mesh does not have the axis."""
    index = mesh["ranks"].index(rank)
    for name, size in reversed(list(zip(mesh["axes"], mesh["shape"], strict=True))):
        if name == axis:
            return int(index % size)
        index //= size
    return 0


def size_of(mesh: Json, axis: str) -> int:
    return int(mesh["shape"][mesh["axes"].index(axis)]) if axis in mesh["axes"] else 1


def line(mesh: Json, axes: Sequence[str], rank: int) -> list[int]:
    """Return the group ranks that differ from `rank` along these axes only, in order."""
    others = [axis for axis in mesh["axes"] if axis not in axes]
    same = [
        r for r in mesh["ranks"] if all(coordinate(mesh, a, r) == coordinate(mesh, a, rank) for a in others)
    ]
    return sorted(same, key=lambda r: [coordinate(mesh, axis, r) for axis in axes])


def flat(bucket: Json, shards: int) -> str:
    return f"{bucket['dtype']}[{bucket['shard'] * shards}]"


def value_of(kind: str, names: list[str], shares: list[Share], tensors: list[str], **more: Any) -> Json:
    made = {"kind": kind, "names": names, "shares": joined(shares), "tensors": tensors, "batch": ""}
    return made | {"held": {}, "bucket": None, "shard": None} | more


def placed(held: dict[str, str], axis: str, after: str) -> dict[str, str]:
    return {a: p for a, p in held.items() if a != axis} | ({} if after == "R" else {axis: after})


def sum_of(terms: Sequence[Json]) -> Json:
    """Return the type of a sum: the terms differ only in the shares that they contain."""
    need(terms, "it adds nothing")
    alike = {json.dumps(value | {"shares": []}, sort_keys=True) for value in terms}
    need(len(alike) == 1, f"it adds different values: {sorted(alike)}")
    return terms[0] | {"shares": joined(share for value in terms for share in value["shares"])}


def in_order(given: Sequence[Json]) -> None:
    shares = [share for value in given for share in value["shares"]]
    good = len({share[0] for share in shares}) == 1 and all(a[3] == b[2] for a, b in pairwise(shares))
    need(good, f"it joins {shares}, which do not follow each other")


class Checker:
    """The checks of one certificate. `check` changes the certificate: it adds to instructions what they read.

    Attributes:
        values: Value of the program -> the output that makes it.
        used: (device, parameter or buffer) -> buckets from which passes read it; None: the device's own copy.
        updated: (device, parameter or buffer) -> the type of its update.
        rounded: Parameter or buffer -> the dtypes to which passes read it rounded; None: unrounded.
        assumptions: Text of each assumption -> the number of operations that need the assumption.
    """

    def __init__(self, certificate: Json) -> None:
        need(certificate.get("format") == FORMAT, f"the file does not have the format {FORMAT!r}. {FIX}")
        self.all, self.program, self.mesh = certificate, certificate["program"], certificate["mesh"]
        self.types, self.buckets, self.parts = (
            certificate["types"],
            certificate["buckets"],
            certificate["divided"],
        )
        self.passes, self.devices = self.program["passes"], certificate["devices"]
        self.experts, self.axes = certificate["experts"], certificate["member_axes"]
        self.samples, self.replicas = self.program["samples"], size_of(self.mesh, "data")
        self.local = self.samples // self.replicas
        self.values = {out["is"]: out for each in self.passes.values() for out in each["outputs"]}
        self.used: dict[tuple[str, str], set[int | None]] = defaultdict(set)
        self.updated: dict[tuple[str, str], Json] = {}
        self.rounded: dict[str, set[str | None]] = defaultdict(set)
        self.assumptions: Counter[str] = Counter()

    def check(self) -> None:
        """Raise `Fault` for the first statement that is wrong."""
        need(self.samples == self.local * self.replicas, "the replicas do not have equal parts of the batch")
        for device, plan in self.devices.items():
            need(plan["rank"] in self.mesh["ranks"], f"device {device} has rank {plan['rank']}")
            times = [x["time"] for x in plan["instructions"]]
            need(all(a < b for a, b in pairwise(times)), f"device {device}: its times do not increase")
            for index, x in enumerate(plan["instructions"]):
                x |= {"device": device, "rank": plan["rank"], "place": index}
        self.match()
        for device in self.devices:
            memory = DeviceMemory(self.types)
            self.each(device, memory.step, memory.end)
        for device in self.devices:
            self.each(device, self.typed, partial(self.ends, device))
        operations = Operations(self.all)
        operations.check()
        self.assumptions = operations.assumptions
        for name, (dtype, *others) in self.rounded.items():
            need(not others, f"passes read {name} rounded in several ways")
            text = f"one device rounds this parameter to {dtype} before it reads it"
            self.assumptions.update([text] * (dtype is not None))

    def each(self, device: str, step: Callable[[Json], None], end: Callable[[], None]) -> None:
        """Call a function for each instruction of a device. Name the instruction in its fault."""
        where = f"device {device}"
        try:
            for i, x in enumerate(self.devices[device]["instructions"]):
                where = f"device {device}, instruction {i} ({x['op']} %{x['node']})"
                step(x)
            where = f"device {device}, at the end"
            end()
        except Fault as fault:
            raise Fault(f"{where}: {fault}") from None
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise Fault(f"{where}: it is malformed ({error!r})") from None

    def match(self) -> None:
        """Match sends with receives, and the collectives of all members, each in one order."""
        ends: dict[tuple[int, int], tuple[list[Json], list[Json]]] = defaultdict(lambda: ([], []))
        groups: dict[tuple[Any, ...], dict[str, list[Json]]] = defaultdict(lambda: defaultdict(list))
        for device, plan in self.devices.items():
            for x in plan["instructions"]:
                if x["op"] in ("send", "post"):
                    end = int(x["op"] == "post")
                    good = str(x["channel"][end]) == device
                    need(good, f"device {device}, {x['op']} %{x['node']}: its channel has another device")
                    ends[x["channel"][0], x["channel"][1]][end].append(x)
                elif x["op"] in COLLECTIVES:
                    groups[*x["members"], x["communicator"]][device].append(x)
        started = {}
        for channel, (sends, posts) in ends.items():
            for k, (send, post) in enumerate(zip_longest(sends, posts)):
                name = f"channel {channel[0]}>{channel[1]}, message {k}"
                if send is None or post is None:
                    raise Fault(f"{name}: {'it is not sent' if send is None else 'no receive takes it'}")
                same = send["node"] == post["message"] and send["tensors"] == post["tensors"]
                need(same, f"{name}: %{send['node']} is sent, and %{post['node']} receives another message")
                need(send["number"] == post["number"] == k, f"{name}: the certificate matches other messages")
                post["sent"] = send
                for x in (send, post):
                    started[x["device"], x["node"]] = max(send["time"], post["time"])
        for (*members, stream), found in groups.items():
            names = list(map(str, members))
            need(set(found) <= set(names), f"group {members}, {stream}: {sorted(found)} use it")
            for k, here in enumerate(zip_longest(*(found[name] for name in names))):
                keys = {tuple(map(x.get, ("node", "op", "number", "rounded"))) for x in here if x is not None}
                good = None not in here and len(keys) == 1
                need(good and here[0]["number"] == k, f"group {members}, {stream}: not all run the same, {k}")
                for x in here:
                    x["met"], started[x["device"], x["node"]] = here, max(y["time"] for y in here)
        for device, plan in self.devices.items():
            for x in plan["instructions"]:
                if x["op"] in ("wait", "retire") and (device, x["node"]) in started:
                    x["started"] = started[device, x["node"]]

    # The types of values. A rule returns the types of what an instruction writes, from the types that it reads.

    def typed(self, x: Json) -> None:
        if x["op"] in ("wait", "record", "await", "retire"):
            return
        rule: Callable[[Json, list[Json]], list[Json]] | None = getattr(self, f"_{x['op']}", None)
        if rule is None:
            raise Fault("there is no rule for this operation")
        made = rule(x, x["given"])
        need(len(made) == len(x["writes"]), f"it makes {len(made)} values and writes {len(x['writes'])}")
        for claim, found in zip(x["makes"], made, strict=True):
            if claim is not None and self.types[claim] != found:
                wrong = [f"{k} {self.types[claim].get(k)} instead of {v}" for k, v in found.items()
                         if self.types[claim].get(k) != v]  # fmt: skip
                raise Fault(f"its type has {', '.join(wrong)}")

    def own(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return samples of a rank's local batch as samples of the batch."""
        need(0 <= start < stop <= self.local, f"{start}:{stop} are not samples of {self.local}")
        first = coordinate(self.mesh, "data", rank) * self.local
        return first + start, first + stop

    def _run(self, x: Json, given: list[Json]) -> list[Json]:
        rank, each, code = x["rank"], self.passes[x["pass"]], self.all["codes"][x["code"]]
        region = x["pass"].split(".")[0]
        experts, one = self.experts.get(region), self.program["regions"][int(region)]["joined"]
        own = self.own(rank, *x["slice"])
        ranks = line(experts["mesh"], experts["axes"], rank) if experts else [rank]
        rows = [s[2:] for s in joined(["", "", *p] for p in {self.own(r, *x["slice"]) for r in ranks})]
        size = self.samples if one else own[1] - own[0]
        good = x["code"].split("/")[0] == f"{x['pass']}@{size}" and ("/member" in x["code"]) == bool(
            self.axes
        )
        need(good and (not one or own[1] - own[0] == self.local), f"it runs the code {x['code']} of {own}")
        need(x["inputs"] == len(each["inputs"]), f"it reads {x['inputs']} of {len(each['inputs'])} inputs")
        taken: list[str] = []
        for k, (value, name) in enumerate(zip(given, each["inputs"], strict=False)):
            role = each["arrives"][k] if experts and each["arrives"] else ""
            away = experts is not None and (role or name.startswith(f"{region}."))
            self.is_read_as(value, name, rows, experts["axes"] if experts and away else [])
            count = len(value["tensors"])  # the number of rows at experts is not known before the step
            taken += code["inputs"][len(taken) : len(taken) + count] if role else value["tensors"]
        taken += self.parameters(x, each, given)
        need(code["inputs"][: len(taken)] == taken, f"its code takes {code['inputs']}, and it reads {taken}")
        self.states(x, each, given, own)
        need(len(x["seeds"]) == len(each["terms"]), "it does not weigh each term of the loss")
        for term, seed in zip(each["terms"], x["seeds"], strict=True):
            weight = given[seed[0]] if isinstance(seed, list) else None
            self.weighs(term, own, seed if weight is None else None, weight, "seed")
        made = []
        for out, tensors in zip(each["outputs"], code["outputs"], strict=True):
            terms = self.terms(out)
            held = {a: p for a, p in out["held"].items() if self.axes and a not in terms}
            if experts and (out["kind"] != "grad" or out["names"][0] in self.parts):
                held |= dict.fromkeys(experts["axes"], "S(0)")
            at = ",".join(f"{a}={coordinate(mesh, a, rank)}" for a, mesh in terms.items())
            made.append(
                value_of(out["kind"], out["names"], [[out["is"], at, *p] for p in rows], tensors, held=held)
            )
        return made

    def is_read_as(self, value: Json, name: str, rows: list[Share], away: list[str]) -> None:
        """A pass must read the value that the program names, of its samples, with the placement of its code."""
        out, there = self.values[name], [share[2:] for share in value["shares"]]
        good = {share[0] for share in value["shares"]} == {name} and value["kind"] == out["kind"]
        need(good and value["bucket"] is None, f"it reads {value['shares']} where the program reads {name}")
        need(
            value["batch"] == out["whole_batch"],
            f"it reads {name} {value['batch']}, not {out['whole_batch']}",
        )
        held = dict(out["held"]) if self.axes else {}
        for axis, before, after in out["changes"] if self.axes else ():
            need(held.get(axis, "R") == before, f"the program changes {name} from {before} along {axis}")
            held = placed(held, axis, after)
        held |= dict.fromkeys(away, "S(0)")
        need(value["held"] == held, f"it reads {name} held as {value['held']}, and its code takes {held}")
        if out["whole_batch"] in ("sum", "gather"):
            need(there == [[0, self.samples]], f"it reads {name} of samples {there}, not of all")
        elif there != rows:  # a value of more samples, whose shape does not depend on their number
            inside = all(any(a <= start and stop <= b for a, b in there) for start, stop in rows)
            need(inside and ".F." in name, f"it works on samples {rows} and reads {name} of {there}")

    def parameters(self, x: Json, each: Json, given: list[Json]) -> list[str]:
        """Check where a pass finds its parameters, and return their tensors."""
        names = each["parameters"]
        need(len(x["params"]) in (0, len(names)), "it does not say where each parameter is")
        for name, source in zip(names + each["state"], x["params"] or [None] * len(names), strict=False):
            if source is not None:
                value = given[source[0]]
                good = value["kind"] == "param" and value["names"][source[1] : source[1] + 1] == [name]
                need(good, f"it reads {name} from {value['names']}")
            self.used[x["device"], name].add(None if source is None else given[source[0]]["bucket"])
            self.rounded[name].add(None if source is None else given[source[0]].get("rounded"))
        for name in each["state"]:
            self.used[x["device"], name].add(None)
        return [self.parts.get(name, self.program["parameters"][name])["tensor"] for name in names]

    def states(self, x: Json, each: Json, given: list[Json], own: tuple[int, int]) -> None:
        """A buffer that each microbatch changes must come from the samples just before."""
        for name, source in zip(each["state"], x["state"], strict=True):
            if source is None:
                fresh = x["slice"][0] == 0 or not self.program["buffers"][name]["passes_on"]
                need(fresh, f"it reads buffer {name} as it was before the step")
                continue
            value = given[source[0]]
            good = self.program["buffers"][name]["passes_on"] and value["names"][source[1]] == name
            need(good and value["shares"][-1][3] == own[0], f"it reads buffer {name} of {value['shares']}")

    def weighs(self, term: int, own: Sequence[int], number: Any, value: Json | None, kind: str) -> None:
        """Samples must enter a term of the loss or a logged value with their weight in the batch."""
        known, parts = self.program["terms"][term], self.replicas if self.program["mean_of_replicas"] else 1
        if value is not None:
            good = value["kind"] == kind and value["shares"] == [[f"term.{term}", "", *own]]
            need(good, f"samples {own} of term {term} have the weight of {value['shares']}")
            return
        whole = (own[1] - own[0]) * parts == self.samples and not known["guarded"]
        need(known["weight"] != "ratio" or whole, f"samples {own} of term {term} need a weight of the batch")
        weight = {"samples": (own[1] - own[0]) / self.samples, "sum": 1 / parts, "ratio": 1 / parts}
        need(number == weight.get(known["weight"], 1.0), f"samples {own} of term {term} have weight {number}")

    def terms(self, out: Json) -> dict[str, Json]:
        """Return axis -> mesh for the axes whose ranks make terms of a gradient."""
        if out["kind"] != "grad":
            return {}
        experts = self.experts.get(out["is"].split(".")[0])
        routed = experts["axes"] if experts and out["names"][0] not in self.parts else []
        summed = [a for a, placement in out["held"].items() if placement == "P" and self.axes]
        return dict.fromkeys(summed, self.mesh) | {a: experts["mesh"] for a in routed}

    # Sums, buckets, cuts

    def _add(self, x: Json, given: list[Json]) -> list[Json]:
        terms = given if x["bucket"] is None else [self._pack(x, [value])[0] for value in given]
        need(
            all(value["kind"] in ("grad", "cotangent") for value in terms),
            "it adds other values than gradients",
        )
        return [sum_of([x["had"], *terms] if x["in_place"] else terms)]

    def _pack(self, x: Json, given: list[Json]) -> list[Json]:
        bucket, (value,) = self.buckets[x["bucket"]], given
        data, groups = size_of(bucket["mesh"], "data"), size_of(bucket["mesh"], "groups")
        taken = [(i, k) for k, i in enumerate(x["take"]) if i is not None]
        good = all(value[n][i] == bucket[n][k] for i, k in taken for n in ("names", "tensors"))
        good = good and value["kind"] == "grad" and value["bucket"] is None
        need(
            good and set(value["held"]) == set(bucket["along"]),
            "it packs values that its bucket does not have",
        )
        held = dict.fromkeys(bucket["along"], "S(0)")
        more = {"held": held, "bucket": x["bucket"], "shard": [0, 1] if held and data * groups == 1 else None}
        names = [value["names"][i] for i, _ in taken]
        return [value_of("grad", names, value["shares"], [flat(bucket, data)], **more)]

    def _cut(self, x: Json, given: list[Json]) -> list[Json]:
        (value,), (share, *more), d = given, given[0]["shares"], x["dim"]
        rows, rest = divmod(shape_of(value["tensors"][0])[d], share[3] - share[2])
        need(
            not more and not rest and x["start"] % rows == x["stop"] % rows == 0, "it cuts inside of a sample"
        )
        part = [*share[:2], share[2] + x["start"] // rows, share[2] + x["stop"] // rows]
        need(share[2] <= part[2] < part[3] <= share[3], f"it cuts samples {part[2:]} out of {share[2:]}")
        shapes = [(tensor, shape_of(tensor)) for tensor in value["tensors"]]
        made = [with_shape(t, [*s[:d], x["stop"] - x["start"], *s[d + 1 :]]) for t, s in shapes]
        return [value | {"shares": [part], "tensors": made}]

    def _concat(self, x: Json, given: list[Json]) -> list[Json]:
        return [self.concatenated(given, x["dim"])]

    def concatenated(self, given: Sequence[Json], d: int) -> Json:
        in_order(given)
        made: list[str] = []
        for tensors in zip(*(value["tensors"] for value in given), strict=True):
            shapes = [shape_of(tensor) for tensor in tensors]
            rows = sum(shape[d] for shape in shapes)
            whole = {with_shape(t, [*s[:d], rows, *s[d + 1 :]]) for t, s in zip(tensors, shapes, strict=True)}
            need(len(whole) == 1, f"it joins {tensors}")
            made += whole
        return sum_of([value | {"tensors": made} for value in given])

    def _store(self, x: Json, given: list[Json]) -> list[Json]:
        return given

    _fetch = _store

    # Messages and collectives

    def _send(self, x: Json, given: list[Json]) -> list[Json]:
        need(x["tensors"] == given[0]["tensors"], f"it sends {x['tensors']} and has {given[0]['tensors']}")
        return []

    def _post(self, x: Json, given: list[Json]) -> list[Json]:
        found: list[Json] = x["sent"]["given"]
        return found

    def parties(self, x: Json, mesh: Json, axes: Sequence[str]) -> list[list[Json]]:
        """Return what each member of a collective reads. The members must be a line of the mesh."""
        ranks = [other["rank"] for other in x["met"]]
        need(ranks == line(mesh, axes, x["rank"]), f"group ranks {ranks} are not a line along {axes}")
        return [other["given"] for other in x["met"]]

    def _reduce(self, x: Json, given: list[Json]) -> list[Json]:
        terms = [value for other in x["met"] for value in other["given"]]
        good = all(v["kind"] in ("grad", "count", "metrics") and v["bucket"] == x["bucket"] for v in terms)
        need(good, "it sums other values than terms, or another bucket")
        return [sum_of(terms)]

    def _reduce_scatter(self, x: Json, given: list[Json]) -> list[Json]:
        bucket = self.buckets[x["bucket"]]
        total = sum_of([value for (value,) in self.parties(x, bucket["mesh"], ["data"])])
        need(total["bucket"] == x["bucket"] and total["shard"] is None, "it does not sum a whole bucket")
        return [total | {"shard": [x["met"].index(x), len(x["met"])], "tensors": [flat(bucket, 1)]}]

    def _all_gather(self, x: Json, given: list[Json]) -> list[Json]:
        bucket = self.buckets[x["bucket"]]
        whole = [flat(bucket, len(self.parties(x, bucket["mesh"], ["data"])))]
        held = dict.fromkeys(bucket["along"], "S(0)")
        rounded = {} if x["rounded"] is None else {"rounded": x["rounded"]}
        need(
            not rounded or not x["kept"], f"it rounds {bucket['names']} in memory that is kept between steps"
        )
        return [value_of("param", bucket["names"], [], whole, held=held, bucket=x["bucket"], **rounded)]

    def _total(self, x: Json, given: list[Json]) -> list[Json]:
        made = sum_of([value for there in self.parties(x, self.mesh, ["data"]) for value in there])
        need(self.values[made["shares"][0][0]]["whole_batch"] == "sum", "it sums values that are no terms")
        return [made | {"batch": "sum"}]

    def _gather_samples(self, x: Json, given: list[Json]) -> list[Json]:
        parts = [value for there in self.parties(x, self.mesh, ["data"]) for value in there]
        return [self.concatenated(parts, 0) | {"batch": "gather"}]

    def _scatter_samples(self, x: Json, given: list[Json]) -> list[Json]:
        total = sum_of([value for (value,) in self.parties(x, self.mesh, ["data"])])
        need(
            [s[2:] for s in total["shares"]] == [[0, self.samples]],
            f"it sums {total['shares']}, not all samples",
        )
        made = [changed(tensor, "R", "S(0)", len(x["met"])) for tensor in total["tensors"]]
        return [given[0] | {"tensors": made, "batch": "scatter"}]

    def _redistribute(self, x: Json, given: list[Json]) -> list[Json]:
        axis, before, after, value = x["axis"], x.get("before", "P"), x.get("after", "R"), given[0]
        need(all(other == given for other in self.parties(x, self.mesh, [axis])), "members have other values")
        need(value["held"].get(axis, "R") == before != "R", f"it changes {before}, and reads {value['held']}")
        made = [changed(tensor, before, after, len(x["met"])) for tensor in value["tensors"]]
        return [value | {"held": placed(value["held"], axis, after), "tensors": made}]

    _shift = _sum_parts = _redistribute

    def _cut_out(self, x: Json, given: list[Json]) -> list[Json]:
        axis, (value,) = x["axis"], given
        right = (coordinate(self.mesh, axis, x["rank"]), size_of(self.mesh, axis))
        need((x["index"], x["count"]) == right and axis not in value["held"], f"it cuts part {x['index']}")
        made = [changed(tensor, "R", x["after"], x["count"]) for tensor in value["tensors"]]
        return [value | {"held": placed(value["held"], axis, x["after"]), "tensors": made}]

    def _all_to_all(self, x: Json, given: list[Json]) -> list[Json]:
        experts, axis, back = self.experts[str(x["region"])], x["axis"], x["direction"] == "combine"
        parts = [there[0] for there in self.parties(x, experts["mesh"], [axis])]
        need(all((axis in value["held"]) == back for value in parts), "it moves rows that are not there")
        held = placed(given[0]["held"], axis, "R" if back else "S(0)")
        name, region = given[0]["shares"][0][0], f"{x['region']}."
        reading = [each for key, each in self.passes.items() if key.startswith(region)]
        pairs = [pair for each in reading for pair in zip(each["inputs"], each["arrives"], strict=False)]
        need(back or (name, x["direction"]) in pairs, f"its region reads {name} otherwise")
        if len(given) == 3:
            good = (given[1]["shares"][0][0], "counts") in pairs and axis in given[2]["held"]
            need(good, "it moves rows by other counts than its region's")
        shares = joined(share for value in ([given[0]] if back else parts) for share in value["shares"])
        if back:  # the rows of the ranks that still share them
            ranks = line(experts["mesh"], [a for a in held if a in experts["axes"]], x["rank"])
            mine = [self.own(rank, 0, self.local) for rank in ranks]
            found = [[*s[:2], max(a, s[2]), min(b, s[3])] for s in shares for a, b in mine]
            shares = joined(share for share in found if share[2] < share[3])
        return [given[0] | {"held": held, "shares": shares, "tensors": [x["tensor"]]}]

    # Weights, loss, logged values, outputs

    def _count(self, x: Json, given: list[Json]) -> list[Json]:
        own = [[*self.own(x["rank"], *part)] for part in x["slices"]]
        shares = [[f"term.{term}", "", *part] for term in x["terms"] for part in own]
        made = [self.types[claim] for claim in x["makes"]]
        return [
            made[0] | {"kind": "counts", "shares": shares},
            made[1] | {"kind": "count", "shares": joined(shares)},
        ]

    def _weigh(self, x: Json, given: list[Json]) -> list[Json]:
        own, total = given
        mean = self.program["mean_of_replicas"]
        whole = self.own(x["rank"], 0, self.local) if mean else (0, self.samples)
        good = (
            own["kind"] == "counts"
            and total["kind"] == "count"
            and x["parts"] == (self.replicas if mean else 1)
        )
        good = good and total["shares"] == sorted([f"term.{term}", "", *whole] for term in x["terms"])
        need(good, f"it divides by {x['parts']} and the counts of {total['shares']}")
        made = [{} if claim is None else self.types[claim] for claim in x["makes"]]
        kinds = product(own["shares"], ("weight", "seed"))
        return [
            claim | {"kind": kind, "shares": [share]}
            for claim, (share, kind) in zip(made, kinds, strict=True)
        ]

    def _merge(self, x: Json, given: list[Json]) -> list[Json]:
        weights, values = iter(given[len(x["metrics"]) :]), given[: len(x["metrics"])]
        for value, metric, number in zip(values, x["metrics"], x["weights"], strict=True):
            (share,) = value["shares"]
            out, name = self.values[share[0]], self.program["metrics"][metric]
            need(out["term"] is not None and out["names"] == [name], f"it merges {share[0]} as {name}")
            self.weighs(out["term"], share[2:], number, next(weights) if number is None else None, "weight")
        first = not any(coordinate(self.mesh, a, x["rank"]) for a in self.mesh["axes"] if a != "data")
        need(x["counts"] == first, "of the ranks with the same samples, the first one counts")
        shares = joined(share for value in values for share in value["shares"]) if first else []
        return [self.types[x["makes"][0]] | {"kind": "metrics", "shares": shares}]

    def _report(self, x: Json, given: list[Json]) -> list[Json]:
        found = joined(share for value in given for share in value["shares"])
        wanted = sorted(name for name, out in self.values.items() if out["term"] is not None)
        all_of = [[name, "", 0, self.samples] for name in wanted]
        need(found == all_of, f"it reports {found}, not all of {wanted}")
        return []

    def _join(self, x: Json, given: list[Json]) -> list[Json]:
        in_order(given)
        found = (given[0]["shares"][0][2], given[-1]["shares"][-1][3])
        good = all(value["kind"] == "argument" and value["names"] == x["names"] for value in given)
        need(
            good and found == self.own(x["rank"], 0, self.local), f"it joins samples {found} of {x['names']}"
        )
        return []

    def _deliver(self, x: Json, given: list[Json]) -> list[Json]:
        (value,) = given
        good = all(value[name] == x[name] for name in ("kind", "names", "bucket"))
        need(good and (value["shard"] is None) == (x["shard"] is None), f"it outputs {value['names']}")
        for name in x["names"]:
            need((x["device"], name) not in self.updated, f"{name} is updated twice")
            self.updated[x["device"], name] = value
            if x["kind"] == "grad":
                self.complete(name, value)
            else:
                found = [share for share in value["shares"] if name in self.values[share[0]]["names"]]
                last = self.own(x["rank"], 0, self.local)[1]
                need(found and found[-1][3] == last, f"it outputs {name} of samples {found}")
        return []

    def _early_update(self, x: Json, given: list[Json]) -> list[Json]:
        (value,) = given
        need(value["bucket"] == x["bucket"] and value["shard"] is not None, f"it updates {value['names']}")
        for name in value["names"]:
            self.complete(name, value)
        return []

    def complete(self, name: str, value: Json) -> None:
        """A gradient must have the terms of all passes that make it, for all samples."""
        wanted = []
        for of in [of for of, out in self.values.items() if out["kind"] == "grad" and name in out["names"]]:
            terms = self.terms(self.values[of]).items()
            parts = product(*([f"{a}={i}" for i in range(size_of(m, a))] for a, m in terms))
            wanted += [[of, ",".join(at), 0, self.samples] for at in parts]
        found = joined(share for share in value["shares"] if name in self.values[share[0]]["names"])
        need(found == sorted(wanted), f"the gradient of {name} sums {found}, not {sorted(wanted)}")

    def ends(self, device: str) -> None:
        """Each device must update each parameter and buffer that it uses, in the shards from which it reads it."""
        known = self.program["parameters"] | self.program["buffers"]
        layout = ("names", "tensors", "offsets", "shard", "mesh", "along")
        for (_, name), read in [item for item in self.used.items() if item[0][0] == device]:
            if not known[name]["updated"]:
                continue
            need((device, name) in self.updated, f"{name} is used, and no instruction updates it")
            value = self.updated[device, name]
            for bucket in read:
                if bucket is None or value["shard"] is None:
                    need(
                        bucket is None and value["shard"] in (None, [0, 1]),
                        f"{name} is read whole and updated in shards, or the reverse",
                    )
                    continue
                mine, other = self.buckets[bucket], self.buckets[value["bucket"]]
                need(
                    all(mine[k] == other[k] for k in layout), f"{name} is read from other shards than it has"
                )


def verify(path: Path) -> int:
    """Verify the certificate in a file. Return 0 if every statement holds. If not, print the first fault to stderr
    and return 1."""
    try:
        checker = Checker(json.loads(path.read_text(encoding="utf-8")))
        checker.check()
    except (Fault, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        other = f"the file cannot be read as a certificate ({error!r}). {FIX}"
        print(f"{path}: {error if isinstance(error, Fault) else other}", file=sys.stderr)
        return 1
    print(f"{path}: verified")
    for text, count in sorted(checker.assumptions.items()):
        print(f"  assumes ({count}): {text}")
    return 0


if __name__ == "__main__":
    sys.exit(verify(Path(sys.argv[1])))
