"""The text of a two-stage MLP's training step, before and after each directive: what the rewrites do,
readable.
"""

from __future__ import annotations

from lightning_piper.directives import Directive, Order, Place, Split
from lightning_piper.ops.build import build_dag
from lightning_piper.passes import apply_program
from tests.models import captured

CAPTURED = """\
training step of 4 samples
%0 F[PP=0] 0:4 @? -> activation:tanh float32[4,6], saved:BW float32[4,6]
%1 F[PP=1] 0:4 @? (%0.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[4,2], saved:BW float32[4,6], saved:BI,BW x0
%2 B[PP=1] 0:4 @? (%1.2, %1.3, %1.4) -> grad:second.weight,second.bias x2, cotangent:mm float32[4,6]
%3 B[PP=0] 0:4 @? (%0.1, %2.1) -> grad:first.weight,first.bias x2
%4 accumulate [PP=1] @? (%2.0) -> grad:second.weight,second.bias x2
%5 accumulate [PP=0] @? (%3.0) -> grad:first.weight,first.bias x2
%6 update [PP=1] @? (%4.0)
%7 update [PP=0] @? (%5.0)
%8 metrics [PP=1] @? (%1.0, %1.1) -> metrics:returned loss,train_loss float64[2]
%9 report @? (%8.0)"""

FIRST_PLACED = """\
training step of 4 samples
%0 F[PP=0] 0:4 @0 -> activation:tanh float32[4,6], saved:BW float32[4,6]
%1 F[PP=1] 0:4 @? (%0.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[4,2], saved:BW float32[4,6], saved:BI,BW x0
%2 B[PP=1] 0:4 @? (%1.2, %1.3, %1.4) -> grad:second.weight,second.bias x2, cotangent:mm float32[4,6]
%3 B[PP=0] 0:4 @0 (%0.1, %2.1) -> grad:first.weight,first.bias x2
%4 accumulate [PP=1] @? (%2.0) -> grad:second.weight,second.bias x2
%5 accumulate [PP=0] @0 (%3.0) -> grad:first.weight,first.bias x2
%6 update [PP=1] @? (%4.0)
%7 update [PP=0] @0 (%5.0)
%8 metrics [PP=1] @? (%1.0, %1.1) -> metrics:returned loss,train_loss float64[2]
%9 report @0 (%8.0)"""

BOTH_PLACED = """\
training step of 4 samples
%0 F[PP=0] 0:4 @0 -> activation:tanh float32[4,6], saved:BW float32[4,6]
%10 send to 1 [PP=0] @0 stream=send (%0.0) -> activation:tanh float32[4,6] #1
%11 recv from 0 [PP=0] @1 stream=recv (%10.0) -> activation:tanh float32[4,6] #1
%1 F[PP=1] 0:4 @1 stream=fast (%11.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[4,2], saved:BW float32[4,6], saved:BI,BW x0
%2 B[PP=1] 0:4 @1 stream=fast (%1.2, %1.3, %1.4) -> grad:second.weight,second.bias x2, cotangent:mm float32[4,6]
%4 accumulate [PP=1] @1 (%2.0) -> grad:second.weight,second.bias x2
%6 update [PP=1] @1 (%4.0)
%8 metrics [PP=1] @1 (%1.0, %1.1) -> metrics:returned loss,train_loss float64[2] P(sum)
%12 send to 0 [PP=1] @1 stream=send (%2.1) -> cotangent:mm float32[4,6] #1
%13 recv from 1 [PP=1] @0 stream=recv (%12.0) -> cotangent:mm float32[4,6] #1
%3 B[PP=0] 0:4 @0 (%0.1, %13.0) -> grad:first.weight,first.bias x2
%5 accumulate [PP=0] @0 (%3.0) -> grad:first.weight,first.bias x2
%7 update [PP=0] @0 (%5.0)
%14 allreduce @0,1 stream=metrics (%8.0) -> metrics:returned loss,train_loss float64[2] #1
%9 report @0,1 (%14.0)"""

SPLIT = """\
training step of 4 samples
%15 F[PP=0,MB=0] 0:2 @0 -> activation:tanh float32[2,6], saved:BW float32[2,6] #2
%16 F[PP=0,MB=1] 2:4 @0 -> activation:tanh float32[2,6], saved:BW float32[2,6] #2
%23 send to 1 [PP=0,MB=0] @0 stream=send (%15.0) -> activation:tanh float32[2,6] #1
%24 recv from 0 [PP=0,MB=0] @1 stream=recv (%23.0) -> activation:tanh float32[2,6] #1
%17 F[PP=1,MB=0] 0:2 @1 stream=fast (%24.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[2,2], saved:BW float32[2,6], saved:BI,BW x0 #2
%19 B[PP=1,MB=0] 0:2 @1 stream=fast (%17.2, %17.3, %17.4) -> grad:second.weight,second.bias x2, cotangent:mm float32[2,6] #2
%25 send to 1 [PP=0,MB=1] @0 stream=send (%16.0) -> activation:tanh float32[2,6] #1
%26 recv from 0 [PP=0,MB=1] @1 stream=recv (%25.0) -> activation:tanh float32[2,6] #1
%18 F[PP=1,MB=1] 2:4 @1 stream=fast (%26.0) -> loss:returned loss float32[], log:train_loss float32[], \
saved:BI float32[2,2], saved:BW float32[2,6], saved:BI,BW x0 #2
%8 metrics [PP=1] @1 (%17.0, %18.0, %17.1, %18.1) -> metrics:returned loss,train_loss float64[2] P(sum)
%14 allreduce @0,1 stream=metrics (%8.0) -> metrics:returned loss,train_loss float64[2] #1
%9 report @0,1 (%14.0)
%20 B[PP=1,MB=1] 2:4 @1 stream=fast (%18.2, %18.3, %18.4) -> grad:second.weight,second.bias x2, cotangent:mm float32[2,6] #2
%4 accumulate [PP=1] @1 (%19.0, %20.0) -> grad:second.weight,second.bias x2
%6 update [PP=1] @1 (%4.0)
%27 send to 0 [PP=1,MB=0] @1 stream=send (%19.1) -> cotangent:mm float32[2,6] #1
%28 recv from 1 [PP=1,MB=0] @0 stream=recv (%27.0) -> cotangent:mm float32[2,6] #1
%21 B[PP=0,MB=0] 0:2 @0 (%15.1, %28.0) -> grad:first.weight,first.bias x2 #2
%29 send to 0 [PP=1,MB=1] @1 stream=send (%20.1) -> cotangent:mm float32[2,6] #1
%30 recv from 1 [PP=1,MB=1] @0 stream=recv (%29.0) -> cotangent:mm float32[2,6] #1
%22 B[PP=0,MB=1] 2:4 @0 (%16.1, %30.0) -> grad:first.weight,first.bias x2 #2
%5 accumulate [PP=0] @0 (%21.0, %22.0) -> grad:first.weight,first.bias x2
%7 update [PP=0] @0 (%5.0)"""

PROGRAM: list[Directive] = [
    Place(filter={"PP": 0}, devices=[0]),
    Place(filter={"PP": 1}, devices=[1], stream="fast"),
    Split(filter={}, dim_name="MB", num_microbatches=2),
    Order(filters=[{"PP": 0, "MB": 1, "PASS": "F"}, {"PP": 0, "MB": 0, "PASS": "F"}, {"PP": 0, "PASS": "B"}]),
]


def text_after(count: int) -> str:
    return str(apply_program(build_dag(captured("mlp").step), PROGRAM[:count]))


def test_the_captured_step() -> None:
    assert text_after(0) == CAPTURED


def test_a_place_of_a_part_inserts_nothing() -> None:
    assert text_after(1) == FIRST_PLACED


def test_the_place_of_the_other_part_inserts_transfers_and_the_sum_of_the_metrics() -> None:
    assert text_after(2) == BOTH_PLACED


def test_a_split_repeats_the_chunks_and_their_transfers() -> None:
    assert text_after(3) == SPLIT


def test_an_order_adds_waits_and_nothing_else() -> None:
    after = {"%15 ": " after %16", "%21 ": " after %15", "%22 ": " after %15"}
    expected = sorted(line + after.get(line[:4], "") for line in SPLIT.splitlines())
    assert sorted(text_after(4).splitlines()) == expected


def test_the_text_respects_every_edge() -> None:
    dag = apply_program(build_dag(captured("mlp").step), PROGRAM)
    place = {int(line.split()[0][1:]): i for i, line in enumerate(str(dag).splitlines()[1:])}
    assert sorted(place) == sorted(dag.nodes)
    assert all(place[a] < place[b] for a, b in dag.graph.edges)


def test_cut_concat_barrier_and_untagged_work() -> None:
    dag = build_dag(captured("mlp").step)
    apply_program(dag, [Split(filter={"PP": 1}, dim_name="MB", num_microbatches=2)])
    text = str(dag)
    assert "%10 cut [0:2] dim 0 [PP=1] @? (%0.0) -> activation:tanh float32[2,6] #0" in text
    assert "%16 concat dim 0 [PP=0] @? (%14.1, %15.1) -> cotangent:mm float32[4,6] #0" in text
    assert "%0 F[" in str(build_dag(captured("untagged").step))
