"""Seeded faults in certificates. A fault changes the output of the compiler, or a statement about it. `repaired` then makes
all other statements fit the fault as far as possible: times, numbers and types. So a fault is found by its meaning, and not
because a statement about it is left over."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning_piper_cli.certificate.checker import Checker
from lightning_piper_cli.certificate.memory import COLLECTIVES, Fault

Json = dict[str, Any]
Plan = list[Json]


def _all(certificate: Json) -> Plan:
    return [x for plan in certificate["devices"].values() for x in plan["instructions"]]


def _some(certificate: Json, draw: random.Random, good: Callable[[Json], Any]) -> Json | None:
    found = [x for x in _all(certificate) if good(x)]
    return draw.choice(found) if found else None


def _plan(certificate: Json, draw: random.Random) -> Plan:
    found: Plan = draw.choice(list(certificate["devices"].values()))["instructions"]
    return found


# Each function makes one fault in a certificate, and returns whether the certificate has a place for it.


def drop(certificate: Json, draw: random.Random) -> bool:
    plan = _plan(certificate, draw)
    del plan[draw.randrange(len(plan))]
    return True


def duplicate(certificate: Json, draw: random.Random) -> bool:
    plan = _plan(certificate, draw)
    i = draw.randrange(len(plan))
    plan.insert(draw.randrange(i, len(plan)), copy.deepcopy(plan[i]))
    return True


def move(certificate: Json, draw: random.Random) -> bool:
    plan = _plan(certificate, draw)
    x = plan.pop(draw.randrange(len(plan)))
    plan.insert(draw.randrange(len(plan)), x)
    return True


def exchange_nodes(certificate: Json, draw: random.Random) -> bool:
    """Let two instructions of one kind do each other's work."""
    plan = _plan(certificate, draw)
    x = draw.choice(plan)
    others = [y for y in plan if y["op"] == x["op"] and y is not x]
    if not others or x["op"] in ("record", "await"):
        return False
    y = draw.choice(others)
    kept = ("reads", "writes", "stream")
    one, other = ({k: v for k, v in z.items() if k not in kept} for z in (x, y))
    x.update(other)
    y.update(one)
    return True


def other_slot(certificate: Json, draw: random.Random) -> bool:
    """Read or write another slot."""
    plan = _plan(certificate, draw)
    slots = sorted({slot for x in plan for slot in x["writes"] if slot is not None})
    x = draw.choice([x for x in plan if x["reads"] or any(slot is not None for slot in x["writes"])])
    if x["reads"] and draw.random() < 0.7:
        draw.choice(x["reads"])[0] = draw.choice(slots)
    else:
        written = [i for i, slot in enumerate(x["writes"]) if slot is not None]
        if not written:
            return False
        x["writes"][draw.choice(written)] = draw.choice(slots)
    return True


def free(certificate: Json, draw: random.Random) -> bool:
    """Free a slot too early, or not at all."""
    x = _some(certificate, draw, lambda x: x["reads"])
    if x is None:
        return False
    read = draw.choice(x["reads"])
    read[1] = not read[1]
    return True


def other_partner(certificate: Json, draw: random.Random) -> bool:
    """Send to another device, or communicate in another group."""
    x = _some(certificate, draw, lambda x: "channel" in x or len(x.get("members", ())) > 1)
    if x is None:
        return False
    devices = [int(device) for device in certificate["devices"]]
    if "channel" in x:
        x["channel"][draw.randrange(2)] = draw.choice(devices)
    elif draw.random() < 0.5:
        draw.shuffle(x["members"])
    else:
        node, gone = x["node"], draw.choice(x["members"])
        for y in _all(certificate):
            if y["node"] == node and "members" in y:
                y["members"] = [member for member in y["members"] if member != gone]
    return True


def other_weight(certificate: Json, draw: random.Random) -> bool:
    x = _some(
        certificate, draw, lambda x: x.get("seeds") or x.get("weights") or x["op"] in ("weigh", "count")
    )
    if x is None:
        return False
    if x["op"] == "weigh":
        x["parts"] += 1
    elif x["op"] == "count":
        x["slices"][draw.randrange(len(x["slices"]))][1] += draw.choice((-1, 1))
    else:
        weights = x.get("seeds") or x["weights"]
        i = draw.randrange(len(weights))
        known = weights[i]
        weights[i] = (
            known * 2
            if isinstance(known, int | float)
            else 1.0
            if known is None or draw.random() < 0.5
            else [0, 0]
        )
    return True


def other_samples(certificate: Json, draw: random.Random) -> bool:
    x = _some(certificate, draw, lambda x: x["op"] in ("run", "cut"))
    if x is None:
        return False
    if x["op"] == "cut":
        x["start"], x["stop"] = x["start"] + 1, x["stop"] + 1
    else:
        by = draw.choice((-2, -1, 1, 2))
        x["slice"] = [x["slice"][0] + by, x["slice"][1] + by]
    return True


def other_pass(certificate: Json, draw: random.Random) -> bool:
    """Run the code of another pass, or another size."""
    x = _some(certificate, draw, lambda x: x["op"] == "run")
    assert x is not None
    x["code"] = draw.choice(list(certificate["codes"]))
    if draw.random() < 0.5:
        x["pass"] = x["code"].split("@")[0]
    return True


def other_sum(certificate: Json, draw: random.Random) -> bool:
    """Leave a sum out, or make a sum twice."""
    sums = ("add", "reduce", "reduce_groups", "reduce_scatter", "sum_parts", "total", "scatter_samples")
    x = _some(certificate, draw, lambda x: x["op"] in sums)
    if x is None:
        return False
    node = x["node"]
    for plan in certificate["devices"].values():
        mine = plan["instructions"]
        at = [i for i, y in enumerate(mine) if y["node"] == node and y["op"] == x["op"]]
        if not at:
            continue
        if x["op"] == "add":
            if mine[at[-1]] is not x and not any(y is x for y in mine):
                continue
            i = draw.choice(at)
            if draw.random() < 0.5 and mine[i]["in_place"]:
                mine[i - 1 : i + 1] = [mine[i - 1]] if mine[i - 1]["op"] != "run" else [mine[i - 1], mine[i]]
                mine[i - 1]["reads"] += [read for read in mine[i - 1]["reads"][:1]]
            else:
                mine[i]["reads"][-1] = (
                    [mine[i]["writes"][0], False] if mine[i]["in_place"] else mine[i]["reads"][0]
                )
        else:  # readers take the term instead of the sum
            for i in at:
                mine[i]["members"] = [int(plan_device(certificate, mine))]
    return True


def plan_device(certificate: Json, plan: Plan) -> str:
    return next(device for device, each in certificate["devices"].items() if each["instructions"] is plan)


def other_parameter(certificate: Json, draw: random.Random) -> bool:
    """Exchange parameters: in an update, in a bucket, or in what a pass reads."""
    x = _some(
        certificate,
        draw,
        lambda x: len(x.get("names", ())) > 1 or len(x.get("take", ())) > 1 or len(x.get("params", ())) > 1,
    )
    if x is None:
        return False
    name = next(name for name in ("names", "take", "params") if len(x.get(name, ())) > 1)
    i, j = draw.sample(range(len(x[name])), 2)
    x[name][i], x[name][j] = x[name][j], x[name][i]
    return True


def other_bucket(certificate: Json, draw: random.Random) -> bool:
    x = _some(certificate, draw, lambda x: x.get("bucket") is not None)
    if x is None or len(certificate["buckets"]) < 2:
        return False
    x["bucket"] = draw.choice([i for i in range(len(certificate["buckets"])) if i != x["bucket"]])
    return True


def other_stream(certificate: Json, draw: random.Random) -> bool:
    """Run an instruction on another stream, or forget that a stream uses the memory of another one."""
    x = _some(certificate, draw, lambda x: True)
    shared = _some(certificate, draw, lambda x: x.get("shared"))
    if shared is not None and draw.random() < 0.4:
        shared["shared"].pop(draw.randrange(len(shared["shared"])))
        return True
    assert x is not None
    streams = sorted({y["stream"] for y in _all(certificate)})
    x["stream"] = draw.choice(streams)
    return True


def other_event(certificate: Json, draw: random.Random) -> bool:
    """Wait for another event, or for none."""
    plan = _plan(certificate, draw)
    waits = [i for i, x in enumerate(plan) if x["op"] == "await"]
    if not waits:
        return False
    i = draw.choice(waits)
    if draw.random() < 0.5:
        shared = plan.pop(i)["shared"]
        later = [x for x in plan[i:] if x["op"] == "await"]
        if later:
            later[0]["shared"] = sorted({*later[0]["shared"], *shared})
    else:
        plan[i]["event"] = max(0, plan[i]["event"] - 1)
    return True


def other_placement(certificate: Json, draw: random.Random) -> bool:
    """Change the placement that an instruction or an operation makes or reads."""
    x = _some(
        certificate,
        draw,
        lambda x: x["op"] in ("redistribute", "shift", "cut_out", "all_to_all", "sum_parts"),
    )
    nodes = [node for code in certificate["codes"].values() for node in code["nodes"] if node["held"]]
    if x is not None and draw.random() < 0.5:
        name = draw.choice(
            [name for name in ("before", "after", "axis", "index", "direction", "members") if name in x]
        )
        x[name] = {
            "before": lambda: "S(1)" if x["before"] != "S(1)" else "S(0)",
            "after": lambda: "S(1)" if x["after"] != "S(1)" else "S(0)",
            "axis": lambda: "data",
            "index": lambda: 1 - x["index"],
            "direction": lambda: "combine" if x["direction"] == "dispatch" else "dispatch",
            "members": lambda: list(reversed(x["members"])),
        }[name]()
        return True
    if not nodes:
        return False
    node = draw.choice(nodes)
    axis = draw.choice(list(node["held"]))
    made = draw.choice([text for text in ("P", "R", "S(0)", "S(1)") if text != node["held"][axis]])
    for graph in (*certificate["codes"].values(), *certificate["program"]["graphs"].values()):
        for other in graph["nodes"]:
            if other["name"] == node["name"] and other["held"]:
                other["held"] = other["held"] | {axis: made}
    return True


def other_operation(certificate: Json, draw: random.Random) -> bool:
    """Change an operation of the code that a pass runs, or of one pass of a split backward pass."""
    graphs = [*certificate["codes"].values()]
    graphs += [g for name, g in certificate["program"]["graphs"].items() if name.endswith(("BI", "BW"))]
    graph = draw.choice(graphs)
    nodes = [node for node in graph["nodes"] if node["op"] not in ("input", "output") and node["args"]]
    if not nodes:
        return False
    node = draw.choice(nodes)
    way = draw.randrange(3)
    if way == 0:
        node["op"] = draw.choice(
            [other for other in ("aten.sub.Tensor", "aten.relu.default") if other != node["op"]]
        )
    elif way == 1:
        node["args"] = [
            draw.choice([f"%{other['name']}" for other in graph["nodes"][:-1]]),
            *node["args"][1:],
        ]
    else:
        numbers = [i for i, each in enumerate(node["args"]) if type(each) in (int, float)]
        if not numbers:
            return False
        i = draw.choice(numbers)
        node["args"] = [3 * each + 1 if k == i else each for k, each in enumerate(node["args"])]
    return True


KINDS: dict[str, Callable[[Json, random.Random], bool]] = {
    "an instruction is missing": drop,
    "an instruction runs twice": duplicate,
    "an instruction runs at another time": move,
    "two instructions do each other's work": exchange_nodes,
    "another slot": other_slot,
    "a slot is freed early or never": free,
    "another partner or group": other_partner,
    "another weight": other_weight,
    "other samples": other_samples,
    "another pass or size": other_pass,
    "a sum is left out or made twice": other_sum,
    "another parameter": other_parameter,
    "another bucket": other_bucket,
    "another stream": other_stream,
    "another event": other_event,
    "another placement": other_placement,
    "another operation": other_operation,
}


def repaired(certificate: Json) -> None:
    """Make times, numbers and types of a certificate fit its instructions, as far as there are any that fit."""
    _number(certificate)
    _time(certificate)
    with contextlib.suppress(Fault, LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        _type(certificate)


def _number(certificate: Json) -> None:
    for plan in certificate["devices"].values():
        count: Counter[str] = Counter()
        for x in plan["instructions"]:
            if x["op"] in ("send", "post") or x["op"] in COLLECTIVES:
                key = str([x["op"] == "post", x.get("channel"), x.get("members"), x.get("communicator")])
                x["number"], count[key] = count[key], count[key] + 1


def _time(certificate: Json) -> None:
    """Run the plans until each device ends or must wait forever."""
    plans = {device: plan["instructions"] for device, plan in certificate["devices"].items()}
    parties: dict[str, set[str]] = {}
    for device, plan in plans.items():
        for x in plan:
            if x["op"] in ("send", "post") or x["op"] in COLLECTIVES:
                parties.setdefault(_meeting(x), set()).add(device)
    met: dict[str, set[str]] = {}
    at, time, moved = dict.fromkeys(plans, 0), 0, True
    begun: dict[tuple[str, int], str] = {}
    while moved:
        moved = False
        for device, plan in plans.items():
            while at[device] < len(plan):
                x = plan[at[device]]
                if x["op"] in ("wait", "retire"):
                    meeting = begun.get((device, x["node"]))
                    if meeting is not None and met[meeting] != parties[meeting]:
                        break
                elif x["op"] in ("send", "post") or x["op"] in COLLECTIVES:
                    begun[device, x["node"]] = _meeting(x)
                    met.setdefault(_meeting(x), set()).add(device)
                x["time"], time, moved, at[device] = time, time + 1, True, at[device] + 1
    for device, plan in plans.items():
        for x in plan[at[device] :]:
            x["time"], time = time, time + 1


def _meeting(x: Json) -> str:
    return str([x.get("channel") or [x["members"], x["communicator"]], x["number"]])


def _type(certificate: Json) -> None:
    """Give each slot the type that the checker's rules imply, in the order of times."""
    checker = Checker(certificate)
    for device, plan in certificate["devices"].items():
        for index, x in enumerate(plan["instructions"]):
            x |= {"device": device, "rank": plan["rank"], "place": index}
    checker.match()
    held: dict[tuple[str, int], int] = {}
    known = {json.dumps(each, sort_keys=True): i for i, each in enumerate(certificate["types"])}
    later: Plan = []
    for x in sorted(_all(certificate), key=lambda x: x["time"]):
        device = x["device"]
        if x["op"] == "wait":
            x["makes"] = [held[device, x["writes"][0]]]
            continue
        if x.get("in_place"):
            x["had"] = certificate["types"][held[device, x["writes"][0]]]
        x["given"] = [certificate["types"][held[device, slot]] for slot, _ in x["reads"]]
        later.append(x)
        for y in list(later):
            if not all("given" in z for z in [*y.get("met", ()), *([y["sent"]] if "sent" in y else [])]):
                continue
            later.remove(y)
            if not y["writes"]:
                continue
            made = getattr(checker, f"_{y['op']}")(y, y["given"])
            for k, (slot, each) in enumerate(zip(y["writes"], made, strict=True)):
                if slot is not None:
                    text = json.dumps(each, sort_keys=True)
                    if text not in known:
                        known[text] = len(certificate["types"])
                        certificate["types"].append(each)
                    y["makes"][k] = held[y["device"], slot] = known[text]


def cleaned(certificate: Json) -> Json:
    """Return a certificate as a file has it, without what the checker has added."""
    for x in _all(certificate):
        for name in ("device", "rank", "place", "met", "sent", "given", "had", "started"):
            x.pop(name, None)
    found: Json = json.loads(json.dumps(certificate))
    return found


def meaning(certificate: Json) -> str:
    """Return what the devices compute and communicate: each operation, the operations that made what it reads, the order in each
    channel and group, and the code. Slots, times, types, and the order of independent instructions are left out."""
    unused = {"reads", "writes", "makes", "time", "number", "stream", "in_place", "shared", "event"}
    found: list[Any] = [certificate["program"], certificate["codes"], certificate["buckets"]]
    for device, plan in certificate["devices"].items():
        maker: dict[int, str] = {}
        order: Counter[str] = Counter()
        here = []
        for x in plan["instructions"]:
            if x["op"] in ("record", "await", "wait", "retire"):
                continue
            slots = [slot for slot, _ in x["reads"]] + (x["writes"] if x.get("in_place") else [])
            fields = {name: each for name, each in x.items() if name not in unused}
            if x["op"] not in ("send", "post", *COLLECTIVES):
                del fields["node"]  # only a name
            key = str(x.get("channel") or [x.get("members"), x.get("communicator")])
            turn = order[key] if x["op"] in ("send", "post") or x["op"] in COLLECTIVES else 0
            order[key] += 1
            text = json.dumps([fields, [maker.get(slot, "nothing") for slot in slots], turn], sort_keys=True)
            here.append(text)
            for i, slot in enumerate(x["writes"]):
                if slot is not None:
                    maker[slot] = f"{i} of {hash(text)}"
        found.append([device, sorted(here)])
    return json.dumps(found, sort_keys=True)


def outcome(certificate: Json, kind: str, draw: random.Random) -> str | None:
    """Make a fault of a kind, and return "caught", "same meaning" (the checker accepts it, and the plans do the same work),
    or "missed". Return None if the certificate has no place for the fault. The certificate changes."""
    before = meaning(certificate)
    if not KINDS[kind](certificate, draw):
        return None
    repaired(certificate)
    mutated = cleaned(certificate)
    try:
        Checker(mutated).check()
    except Fault:
        return "caught"
    return "same meaning" if meaning(cleaned(mutated)) == before else "missed"
