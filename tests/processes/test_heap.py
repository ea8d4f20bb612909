"""Whether a process keeps freed memory for its next step. The page faults of steps show it; each run has a
process of its own.
"""

import json
import os
import platform
import subprocess
import sys

import pytest

STEPS = """
import json, resource, sys, torch
from lightning_piper.processes.heap import give_freed_memory_back, keep_freed_memory

def faults_of_a_step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.full((size << 18,), 1.0) for _ in range(128 // size)]
    assert sum(x[0].item() for x in made) == len(made)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

size, limit, keep, back = *map(int, sys.argv[1:3]), *(word == "1" for word in sys.argv[3:])
if limit:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
kept = keep_freed_memory() if keep else False
found = [faults_of_a_step() for _ in range(10)]
full = resident()
if back and kept:
    give_freed_memory_back()
print(json.dumps([kept, found, full - resident(), [faults_of_a_step() for _ in range(2)]]))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another library manages memory")


def run(keep: bool, back: bool = False, size: int = 8, limit: int = 0, **environment: str) -> list:
    """Run steps in a process of their own, and return what it prints. `size` is the size of the tensors in
    MiB, `limit` the bytes of address space that the process may use (0: no limit).
    """
    words = [str(int(word)) for word in (size, limit, keep, back)]
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *words],
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean(), **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def clean() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"
    }


@pytest.mark.parametrize("size", [8, 64])
def test_a_step_finds_the_memory_of_the_step_before(size):
    kept, steps, _, _ = run(keep=True, size=size)
    assert kept
    assert steps[0] > 100 * max(
        steps[5:]
    )  # the first ones get it from the system, until each tensor has a place of its own


def test_otherwise_each_step_gets_large_tensors_from_the_system():
    """And small ones, too, if the addresses lie so."""
    _, steps, _, _ = run(keep=False, size=64)
    assert min(steps) > 1000


def test_what_is_free_goes_back_to_the_system_at_the_end():
    kept, _, given, after = run(keep=True, back=True)
    assert kept
    assert given > 64 << 20
    assert min(after) > 100


def test_where_address_space_is_limited_memory_goes_back():
    kept, _, given, _ = run(keep=True, back=True, limit=1 << 40)
    assert not kept
    assert given < 64 << 20


@pytest.mark.parametrize(
    "name, value", [("MALLOC_ARENA_MAX", "2"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")]
)
def test_what_the_user_has_set_stays(name, value):
    kept, _, given, _ = run(keep=True, back=True, **{name: value})
    assert not kept
    assert given < 64 << 20
