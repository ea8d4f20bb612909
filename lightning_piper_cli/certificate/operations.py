"""The operations of passes: the code of each pass is the program's code, its values have the stated placements, and the two
passes of a split backward pass compute what the whole backward pass computes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from lightning_piper_cli.certificate.memory import Json, need
from lightning_piper_cli.certificate.rules import RULES, Call, Held, P, Placement, R

OTHER_FORM = (
    "code for fewer samples, or for some experts, may have other views and copies than the code for all"
)
FACTORS = {"aten.mul.Scalar", "aten.div.Scalar", "aten.mul.Tensor", "aten.div.Tensor"}
FREE = {
    "aten.clone.default",
    "aten.reshape.default",
    "aten.t.default",
    "aten.sym_size.int",
}  # views and copies
PROVED = "an operation of Piper without a rule has the stated placements and numbers of parts"
LOSSES = "the loss and logged values are sums of terms over independent samples, with the stated weights"
LINEAR = "the backward pass is not linear in the gradient of the loss"
SIZES = "a number in the code for fewer samples that is in proportion to the samples follows their number"


class Operations:
    """The checks of the operations of a certificate's passes.

    Attributes:
        assumptions: Text of each assumption -> the number of operations or passes that need the assumption.
    """

    def __init__(self, certificate: Json) -> None:
        self.all, self.program, self.assumptions = certificate, certificate["program"], Counter[str]()
        self.made: dict[tuple[str, str], list[Placement]] = {}  # (value, axis) -> placements of its tensors
        self.factor = False  # whether the operation that is compared multiplies by a number
        self.numbers: dict[str, int] = {}  # text of an operation and its inputs -> number of its value

    def check(self) -> None:
        """Raise `Fault` for the first operation that is wrong."""
        self.assumptions[LOSSES] += len(self.program["terms"])
        self.assumptions[LINEAR] += not self.program["linear"]
        for name in self.all["codes"]:
            self.same(name)
        for axis in self.all["member_axes"]:
            for name in sorted(self.program["passes"], key=lambda each: (".F" not in each, each)):
                self.placed(name, axis)
        for region in range(len(self.program["regions"])):
            self.split(f"{region}.")
        self.assumptions += Counter()  # without assumptions that nothing needs

    # The code of each pass

    def same(self, name: str) -> None:
        """The code of a pass must have the operations of the program, with the sizes of fewer samples or of parts."""
        of, _, size = name.split("/")[0].partition("@")
        whole, code = self.program["graphs"][of]["nodes"], self.all["codes"][name]["nodes"]
        other_form = [node["op"] for node in whole] != [node["op"] for node in code]
        if other_form:
            self.assumptions[OTHER_FORM] += 1
            whole, code = (
                without_views(whole),
                without_views(code, counts="/" in name.removesuffix("/member")),
            )
            need(
                [x["op"] for x in whole] == [x["op"] for x in code],
                f"code {name} has other operations than {of}",
            )
        samples, mesh = Fraction(int(size), self.program["samples"]), self.all["mesh"]
        degrees = [mesh["shape"][mesh["axes"].index(axis)] for axis in self.all["member_axes"]]
        parts = {Fraction(1, math.prod(some)) for some in subsets(degrees)}
        renamed = {f"%{a['name']}": f"%{b['name']}" for a, b in zip(whole, code, strict=True)}
        for a, b in zip(whole, code, strict=True):
            where = f"code {name}, {b['name']} ({b['op']})"
            if b["op"].startswith("lightning_piper.attend"):  # it has its own numbers of parts and turns
                a, b = ({**x, "args": list(references(x["args"], x["more"])), "more": {}} for x in (a, b))
            # Without views, a product may be the product of the transposes, in the other order.
            if other_form and a["op"] == "aten.mm.default":
                a = {**a, "args": sorted(renamed[x] for x in a["args"])}
                b = {**b, "args": sorted(b["args"])}
            more = a["more"] if b["more"] or not other_form else {}
            self.factor = b["op"] in FACTORS
            for one, other in ((a["args"], b["args"]), (more, b["more"])):
                need(
                    self.alike(one, other, renamed, samples, parts),
                    f"{where}: {other} is {one} in the program",
                )
            pairs = list(zip(tensors_of(a["makes"]), tensors_of(b["makes"]), strict=True))
            held = [Placement.of(b["held"].get(axis, "R")) for axis in self.all["member_axes"]]
            for (kind, one), (other_kind, other) in pairs:
                good = kind == other_kind and len(one) == len(other)
                for d, (n, m) in enumerate(zip(one, other, strict=False)):
                    share = Fraction(m, n) if n else Fraction(1)
                    here = [g for g, p in zip(degrees, held, strict=True) if p.kind == "S" and p.dim == d]
                    cuts = {Fraction(1, math.prod(here))} if b["held"] else parts
                    good = good and share in {s * cut for s in (Fraction(1), samples) for cut in cuts}
                need(good, f"{where}: it makes {other} of {one}")
        self.leaves(name)

    def leaves(self, name: str) -> None:
        """The tensors that a pass is said to make must be the tensors of its operations."""
        code = self.all["codes"][name]
        made = {f"%{node['name']}": node["makes"] for node in code["nodes"]}
        outputs = [tensor for tensors in code["outputs"] for tensor in tensors]
        names = code["nodes"][-1]["args"][0]
        need(len(names) == len(outputs), f"code {name} makes {len(names)} tensors, not {len(outputs)}")
        rows = "/" not in name.removesuffix("/member")  # the number of rows at experts is not known
        for of, tensor in zip(names, outputs, strict=True) if rows else ():
            need(made.get(of) in (None, tensor), f"code {name}: {of} is {made.get(of)}, not {tensor}")

    def alike(self, a: Any, b: Any, renamed: dict[str, str], samples: Fraction, parts: set[Fraction]) -> bool:
        if isinstance(a, list):
            return isinstance(b, list) and len(a) == len(b) and all(
                self.alike(x, y, renamed, samples, parts) for x, y in zip(a, b, strict=True)
            )  # fmt: skip
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(self.alike(a[k], b[k], renamed, samples, parts) for k in a)
        if a == b or renamed.get(a) == b:
            return type(a) is type(b)
        if (
            not (isinstance(a, int | float) and isinstance(b, int | float))
            or isinstance(a, bool)
            or not a
            or not b
        ):
            return False
        share = Fraction(b) / Fraction(a)
        shares = [s * p for s in (Fraction(1), samples) for p in parts]
        good = share in shares
        if isinstance(a, float) and self.factor:  # such as the factor of a mean
            good = any(math.isclose(share, each) or math.isclose(1 / share, each) for each in shares)
        self.assumptions[SIZES] += good
        return good

    # Placements along an axis

    def placed(self, name: str, axis: str) -> None:
        """Follow the placements through a pass along an axis, by the table of rules."""
        each, graph = self.program["passes"][name], self.program["graphs"][name]
        held: dict[str, Held] = {}
        given = self.inputs(each, axis)
        shapes: dict[str, list[list[int]]] = {}
        degree = self.all["mesh"]["shape"][self.all["mesh"]["axes"].index(axis)]
        for k, node in enumerate(graph["nodes"]):
            key = f"%{node['name']}"
            if node["op"] == "input":
                held[key] = given[k] if k < len(given) else R
                shapes[key] = [tensors_of(graph["inputs"][k])[0][1]]
            elif node["op"] == "output":
                self.outputs(name, each, axis, graph, [held.get(x, R) for x in node["args"][0]])
            else:
                read = [x for x in references(node["args"], node["more"]) if x in shapes]
                shapes[key] = [shape for _, shape in tensors_of(node["makes"])] or shapes[read[0]]
                stated = Placement.of(node["held"].get(axis, "R")) if node["makes"] is not None else None
                one = stated if isinstance(node["makes"], str) else None
                held[key] = self.result(name, node, read, held, shapes, one, degree)

    def result(
        self,
        name: str,
        node: Json,
        read: list[str],
        held: dict[str, Held],
        shapes: dict[str, list[list[int]]],
        stated: Placement | None,
        degree: int,
    ) -> Held:
        """Return the placement of an operation's result, from the placements of the tensors that it reads."""
        key = f"%{node['name']}"
        if node["op"] == "getitem":
            made = held[read[0]][node["args"][1]] if isinstance(held[read[0]], list) else held[read[0]]
            made = stated if made is None else made
        else:
            of = [held[x] for x in read]
            call = Call(
                node["op"], of, [shapes[x][0] for x in read], node["args"], shapes[key], stated, degree
            )
            if set(map(str, of)) <= {str(R)}:
                made = R
            elif node["op"] in RULES:
                made = RULES[node["op"]](call)
            else:
                own = node["op"].startswith("lightning_piper.")
                made = (stated or [None] * len(shapes[key])) if own else None
                self.assumptions[PROVED] += own
        where = f"pass {name}, {node['name']} ({node['op']})"
        shown = [
            f"{p.kind}({p.dim})" if p.kind == "S" else p.kind
            for x in read
            for p in [held[x]]
            if not isinstance(p, list)
        ]
        need(made is not None, f"{where}: no rule lets it read {', '.join(shown)}")
        need(
            stated in (None, made) or isinstance(made, list),
            f"{where}: it is {made}, and the certificate says {stated}",
        )
        return made

    def inputs(self, each: Json, axis: str) -> list[Placement]:
        """Return the placements of the tensors that a pass reads: of its inputs, then of its parameters."""
        found: list[Placement] = []
        values = {
            out["is"]: (p, i)
            for p, other in self.program["passes"].items()
            for i, out in enumerate(other["outputs"])
        }
        for value in each["inputs"]:
            maker, index = values[value]
            out = self.program["passes"][maker]["outputs"][index]
            after = [change[2] for change in out["changes"] if change[0] == axis]
            count = len(self.program["graphs"][maker]["outputs"][index])
            if out["kind"] == "saved":
                found += self.made[value, axis]
            else:
                found += [Placement.of(after[-1] if after else out["held"].get(axis, "R"))] * count
        return found + [self.parameter(name, axis) for name in each["parameters"]]

    def parameter(self, name: str, axis: str) -> Placement:
        part = self.all["divided"].get(name)
        return Placement.of(part["held"]) if part and axis in part["axes"] else R

    def outputs(self, name: str, each: Json, axis: str, graph: Json, found: list[Placement]) -> None:
        """Each tensor that leaves a pass must have the placement that the program states."""
        rest = iter(found)
        for out, tensors in zip(each["outputs"], graph["outputs"], strict=True):
            mine = [next(rest) for _ in tensors]
            self.made[out["is"], axis] = mine
            wanted = [Placement.of(out["held"].get(axis, "R"))] * len(mine)
            if out["kind"] == "grad" and P not in wanted:
                wanted = [self.parameter(param, axis) for param in out["names"]]
            good = out["kind"] == "saved" or mine == wanted
            need(good, f"pass {name}: {out['is']} is {mine} along {axis}, and the program says {wanted}")

    # The passes of a split backward

    def split(self, region: str) -> None:
        """BI and BW must compute what B computes: each output has the same operations on the same inputs."""
        known: dict[str, list[int]] = {}
        passes = self.program["passes"]
        for name in [f"{region}{kind}" for kind in ("F", "B", "BI", "BW") if f"{region}{kind}" in passes]:
            each, graph = passes[name], self.program["graphs"][name]
            at: dict[str, int] = {}
            given = [x for value in each["inputs"] for x in known.get(value) or self.unknown(value)]
            others = [
                f"{kind} {x}"
                for kind in ("parameters", "buffers", "state", "batch", "terms")
                for x in each[kind]
            ]
            given += [self.number(text) for text in others]
            for node in graph["nodes"]:
                if node["op"] == "input":
                    at[node["name"]] = given[len(at)]
                elif node["op"] != "output":
                    at[node["name"]] = self.number(
                        str([node["op"], numbered(node["args"], at), numbered(node["more"], at)])
                    )
            results = iter([at[x[1:]] for x in graph["nodes"][-1]["args"][0]])
            for i, (out, tensors) in enumerate(zip(each["outputs"], graph["outputs"], strict=True)):
                mine = [next(results) for _ in tensors]
                if name.endswith(("BI", "BW")) and out["kind"] != "saved":
                    need(mine == known[out["is"]], f"pass {name}: its output {i} is not {out['is']}")
                known[out["is"]] = mine

    def unknown(self, value: str) -> list[int]:
        name, _, index = value.rpartition(".")
        count = len(self.program["graphs"][name]["outputs"][int(index)])
        return [self.number(f"{value} {i}") for i in range(count)]

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def without_views(nodes: list[Json], counts: bool = False) -> list[Json]:
    """Return nodes without views and copies: readers of these read the value itself. With `counts`, sums of the inputs,
    which are counts of rows from several ranks, are left out as well."""
    source: dict[str, str] = {}
    found: list[Json] = []
    inputs = {f"%{node['name']}" for node in nodes if node["op"] == "input"}
    for node in nodes:
        read = [source.get(x, x) for x in references(node["args"], node["more"])]
        summed_counts = counts and node["op"] == "aten.sum.dim_IntList" and read[0] in inputs
        if node["op"] in FREE or summed_counts:
            source[f"%{node['name']}"] = "" if node["op"] == "aten.sym_size.int" else read[0]
        else:
            kept = [x for x in read if x]
            # A number of rows that arrive at experts is a result of an operation, and in the program a number.
            more = {} if "" in read else {"numbers": list(numbers_of(node["args"], node["more"]))}
            found.append({**node, "args": kept, "more": more, "makes": None})
    return found


def numbered(argument: Any, at: dict[str, int]) -> Any:
    if isinstance(argument, list):
        return [numbered(each, at) for each in argument]
    if isinstance(argument, dict):
        return {name: numbered(each, at) for name, each in argument.items()}
    return (
        f"#{at[argument[1:]]}"
        if isinstance(argument, str) and argument[1:] in at and argument[0] == "%"
        else argument
    )


def references(*arguments: Any) -> Iterator[str]:
    for each in arguments:
        if isinstance(each, str) and each.startswith("%"):
            yield each
        elif isinstance(each, list | dict):
            yield from references(*(each.values() if isinstance(each, dict) else each))


def numbers_of(*arguments: Any) -> Iterator[Any]:
    for each in arguments:
        if isinstance(each, list | dict):
            yield from numbers_of(*(each.values() if isinstance(each, dict) else each))
        elif not isinstance(each, str):
            yield each


def tensors_of(makes: Any) -> list[tuple[str, list[int]]]:
    """Return dtype and shape of each tensor of an operation."""
    if isinstance(makes, list):
        return [found for each in makes for found in tensors_of(each)]
    if makes is None:
        return []
    dtype, _, shape = makes.partition("[")
    return [(dtype, [int(n) for n in shape[:-1].split(",") if n])]


def subsets(items: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for item in items:
        found += [[*each, item] for each in found]
    return found
