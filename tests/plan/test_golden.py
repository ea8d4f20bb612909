"""The text of whole plans, line by line."""

from __future__ import annotations

from tests.plan.programs import plans_of, text

# Two stages and two microbatches under 1F1B. Stage 0 sends both activations before it receives the first
# gradient. That gradient shows that the first activation has arrived, so stage 0 frees the activation at that
# point.
FIRST_STAGE = """
device 0 of 0,1, 4 samples, 10 slots, channels 0>1 1>0
run %15 F[PP=0,MB=0] 0:2 -> s0, s1
record %15 e0
await %23 e0 for s0 stream=send
send %23 (s0!) to 1 stream=send
post %28 -> s5 from 1 stream=recv
run %16 F[PP=0,MB=1] 2:4 -> s2, s3
record %16 e1
await %25 e1 for s2 stream=send
send %25 (s2!) to 1 stream=send
reduce %14 -> s4 over 0,1 stream=metrics
wait %28 -> s5 stream=recv
record %28 e2 stream=recv
retire %23
post %30 -> s7 from 1 stream=recv
await %21 e2 for s5
run %21 B[PP=0,MB=0] 0:2 (s1!, s5!) -> s6
wait %30 -> s7 stream=recv
record %30 e3 stream=recv
retire %25
await %22 e3 for s7
run %22 B[PP=0,MB=1] 2:4 (s3!, s7!) -> s8
add %5 s9 = s6! + s8!
deliver %7 (s9!) as grad:first.weight,first.bias
wait %14 -> s4 stream=metrics
record %14 e4 stream=metrics
await %9 e4 for s4
report %9 (s4!)
"""

# Sends are started before sums are taken, and receives are posted one chunk before they are needed.
LAST_STAGE = """
device 1 of 0,1, 4 samples, 19 slots, channels 0>1 1>0
post %24 -> s0 from 0 stream=recv
wait %24 -> s0 stream=recv
record %24 e0 stream=recv
await %17 e0 for s0
run %17 F[PP=1,MB=0] 0:2 (s0!) -> s1, s2, s3, s4, s5
post %26 -> s8 from 0 stream=recv
run %19 B[PP=1,MB=0] 0:2 (s3!, s4!, s5!) -> s6, s7
record %19 e1
await %27 e1 for s7 stream=send
send %27 (s7!) to 0 stream=send
wait %26 -> s8 stream=recv
record %26 e2 stream=recv
await %18 e2 for s8
run %18 F[PP=1,MB=1] 2:4 (s8!) -> s9, s10, s11, s12, s13
merge %8 (s1!, s9!, s2!, s10!) -> s14
record %8 e3
await %14 e3 for s14 stream=metrics
reduce %14 (s14!) -> s15 over 0,1 stream=metrics
run %20 B[PP=1,MB=1] 2:4 (s11!, s12!, s13!) -> s16, s17
record %20 e4
await %29 e4 for s17 stream=send
send %29 (s17!) to 0 stream=send
add %4 s18 = s6! + s16!
deliver %6 (s18!) as grad:second.weight,second.bias
wait %14 -> s15 stream=metrics
record %14 e5 stream=metrics
await %9 e5 for s15
report %9 (s15!)
retire %27
retire %29
"""

ONE_DEVICE = """
device 0 of 0, 4 samples, 11 slots
run %0 F[PP=0] 0:4 -> s0, s1
run %1 F[PP=1] 0:4 (s0!) -> s2, s3, s4, s5, s6
merge %8 (s2!, s3!) -> s7
run %2 B[PP=1] 0:4 (s4!, s5!, s6!) -> s8, s9
run %3 B[PP=0] 0:4 (s1!, s9!) -> s10
deliver %6 (s8!) as grad:second.weight,second.bias
deliver %7 (s10!) as grad:first.weight,first.bias
report %9 (s7!)
"""


def test_a_pipeline_of_two_stages() -> None:
    plans = plans_of("mlp", 2, 2)
    assert text(plans[0]) == FIRST_STAGE.strip().splitlines()
    assert text(plans[1]) == LAST_STAGE.strip().splitlines()


def test_one_device() -> None:
    (plan,) = plans_of("mlp", 1, 1).values()
    assert text(plan) == ONE_DEVICE.strip().splitlines()


def test_the_same_dag_gives_the_same_plans() -> None:
    assert plans_of("tied", 3, 3) == plans_of("tied", 3, 3)
    assert plans_of("tied", 3, 3) != plans_of("tied", 3, 3, ordered=False)
