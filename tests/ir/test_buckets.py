"""Buckets: every element of every parameter is in one shard, once, and the views of a bucket are the
parameters.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_piper.ir.buckets import ALIGNMENT, Bucket, buckets_of, packed
from lightning_piper.ir.mesh import DATA, Mesh
from lightning_piper.ir.owners import Owners
from lightning_piper.ir.regions import ParamInfo
from lightning_piper.ir.values import TensorSpec, flattened, view_as

CPU = torch.device("cpu")
quick = settings(max_examples=60, derandomize=True, deadline=None, database=None)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@st.composite
def specs(draw: Any, dtype: torch.dtype | None = None) -> TensorSpec:
    """Draw dense tensors of up to three dimensions, with the dimensions in any order in memory."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3))
    strides, width = [0] * len(shape), 1
    for d in draw(st.permutations(range(len(shape)))):
        strides[d], width = width, width * shape[d]
    return TensorSpec(tuple(shape), dtype or draw(st.sampled_from(DTYPES)), tuple(strides))


@st.composite
def buckets(draw: Any) -> Bucket:
    dtype = draw(st.sampled_from(DTYPES))
    tensors = draw(st.lists(specs(dtype), min_size=1, max_size=5))
    names, mesh = tuple(f"p{i}" for i in range(len(tensors))), Mesh.flat(draw(st.integers(1, 5)))
    owners = [draw(st.integers(0, mesh.size(DATA) - 1)) for _ in tensors] if draw(st.booleans()) else None
    return Bucket(names, tuple(tensors), mesh, dtype, owners and tuple(owners))


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec.of(torch.empty(shape, dtype=dtype))


def filled(bucket: Bucket) -> dict[str, torch.Tensor]:
    """Return a tensor for each name, with the strides of its spec. All elements of a bucket differ."""
    counter = itertools.count(1)
    found = {}
    for name, s in zip(bucket.names, bucket.tensors, strict=True):
        tensor = torch.empty_strided(s.shape, s.stride, dtype=torch.float64)
        tensor.copy_(
            torch.tensor([float(next(counter)) for _ in range(s.numel)], dtype=torch.float64).view(s.shape)
        )
        found[name] = tensor.to(s.dtype)
    return found


@quick
@given(buckets())
def test_shards_of_all_members_are_every_element_once(bucket: Bucket) -> None:
    covered: Counter[tuple[str, int]] = Counter()
    for member in range(bucket.members):
        at = 0
        for name, start, stop, offset in bucket.local_shards(member):
            covered.update((name, i) for i in range(start, stop))
            assert at <= offset and offset + stop - start <= bucket.shard, (
                "pieces overlap, or leave the shard"
            )
            at = offset + stop - start
    assert covered == Counter(
        (n, i) for n, s in zip(bucket.names, bucket.tensors, strict=True) for i in range(s.numel)
    )


@quick
@given(buckets())
def test_pieces_are_where_the_parameters_are(bucket: Bucket) -> None:
    """Shards cut apart, pieces put together: the parameters again."""
    tensors = filled(bucket)
    shards = packed(bucket, tensors, CPU).chunk(bucket.members)
    assert {len(shard) for shard in shards} == {bucket.shard} and len(shards) == bucket.members
    again = {
        n: torch.zeros(s.numel, dtype=s.dtype) for n, s in zip(bucket.names, bucket.tensors, strict=True)
    }
    for member, shard in enumerate(shards):
        for name, start, stop, offset in bucket.local_shards(member):
            again[name][start:stop] = shard[offset : offset + stop - start]
    for name, s in zip(bucket.names, bucket.tensors, strict=True):
        assert torch.equal(view_as(again[name], s), tensors[name])
        assert torch.equal(flattened(tensors[name], s), again[name])


@quick
@given(buckets())
def test_views_are_the_parameters_and_share_the_memory(bucket: Bucket) -> None:
    tensors = filled(bucket)
    flat = packed(bucket, tensors, CPU)
    views = bucket.views(flat)
    for view, s, tensor in zip(views, bucket.tensors, tensors.values(), strict=True):
        assert TensorSpec.of(view) == s, "shape, dtype and strides"
        assert torch.equal(view, tensor)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    places = [{*range(v.storage_offset(), v.storage_offset() + v.numel())} for v in views]
    assert sum(map(len, places)) == len(set().union(*places)), "two parameters share memory"


@quick
@given(buckets())
def test_gaps_are_what_no_parameter_fills(bucket: Bucket) -> None:
    filled_ = {
        i
        for start, s in zip(bucket.offsets, bucket.tensors, strict=True)
        for i in range(start, start + s.numel)
    }
    gaps = [i for start, stop in bucket.gaps for i in range(start, stop)]
    assert sorted(gaps) == sorted(set(range(bucket.numel)) - filled_)
    flat = packed(bucket, {n: torch.ones_like(x) for n, x in filled(bucket).items()}, CPU)
    assert flat[gaps].abs().sum() == 0 and flat.sum() == len(filled_)


@quick
@given(buckets(), st.sampled_from(DTYPES))
def test_places_do_not_depend_on_the_dtype(bucket: Bucket, dtype: torch.dtype) -> None:
    """Shards of gradients and of parameters match, whatever gradients are summed in."""
    other = bucket.in_dtype(dtype)
    assert (other.offsets, other.shard, other.gaps) == (bucket.offsets, bucket.shard, bucket.gaps)
    for member in range(bucket.members):
        assert list(other.local_shards(member)) == list(bucket.local_shards(member))
    # Also where the parameters themselves have another size in bytes.
    converted = replace(bucket, tensors=tuple(replace(s, dtype=dtype) for s in bucket.tensors), dtype=dtype)
    assert (converted.offsets, converted.shard) == (bucket.offsets, bucket.shard)


@quick
@given(buckets())
def test_every_tensor_and_shard_is_aligned(bucket: Bucket) -> None:
    starts = [*bucket.offsets, *(member * bucket.shard for member in range(bucket.members))]
    assert all(start % ALIGNMENT == 0 for start in starts)
    ends = [start + s.numel for start, s in zip(bucket.offsets, bucket.tensors, strict=True)]
    assert bucket.numel == bucket.shard * bucket.members >= max(ends)
    if bucket.owners is None:  # no more padding than alignment asks for
        sizes = [-(-s.numel // ALIGNMENT) * ALIGNMENT for s in bucket.tensors]
        assert bucket.numel - sum(sizes) < bucket.members * ALIGNMENT


def test_members_have_whole_tensors_about_as_many_elements_each() -> None:
    tensors = (spec(64, 4), spec(64, 3), spec(5), spec(64), spec(64, 2), spec(3))
    params = [ParamInfo(name, s, True) for name, s in zip("abcdef", tensors, strict=True)]
    (bucket,) = buckets_of(params, 10**6, Mesh.flat(2), owners=Owners(2))
    held = [
        {name: (start, stop) for name, start, stop, _ in bucket.local_shards(member)} for member in range(2)
    ]
    assert held == [{"a": (0, 256), "c": (0, 5), "d": (0, 64)}, {"b": (0, 192), "e": (0, 128), "f": (0, 3)}]
    assert bucket.shard == 384
    assert all(
        stop - start == tensors["abcdef".index(n)].numel for part in held for n, (start, stop) in part.items()
    )
    cut = replace(bucket, owners=None)
    assert any(stop - start < tensors["abcdef".index(n)].numel for n, start, stop, _ in cut.local_shards(0))


@quick
@given(st.lists(specs(), min_size=1, max_size=8), st.integers(1, 400), st.integers(1, 4))
def test_parameters_are_each_in_one_bucket_of_their_dtype(
    tensors: list[TensorSpec], size: int, members: int
) -> None:
    params = [ParamInfo(f"p{i}", s, True) for i, s in enumerate(tensors)]
    found = buckets_of(params, size, Mesh.flat(members))
    assert sorted(n for b in found for n in b.names) == sorted(p.name for p in params)
    for bucket in found:
        assert {s.dtype for s in bucket.tensors} == {bucket.dtype} and bucket.members == members
        assert list(bucket.names) == sorted(bucket.names), "in order"
        # Closed as soon as it is full.
        assert sum(s.nbytes for s in bucket.tensors[:-1]) < size
    for dtype in DTYPES:  # all but the last of a dtype are full
        for bucket in [b for b in found if b.dtype == dtype][:-1]:
            assert sum(s.nbytes for s in bucket.tensors) >= size


def test_one_tensor_a_bucket_and_all_in_one() -> None:
    params = [ParamInfo(f"p{i}", spec(5, 5), True) for i in range(4)]
    assert [b.names for b in buckets_of(params, 1, Mesh.flat(2))] == [("p0",), ("p1",), ("p2",), ("p3",)]
    assert [b.names for b in buckets_of(params, 101, Mesh.flat(2))] == [("p0", "p1"), ("p2", "p3")]
    assert [b.names for b in buckets_of(params, 10**6, Mesh.flat(2))] == [("p0", "p1", "p2", "p3")]
    assert {b.dtype for b in buckets_of(params, 101, Mesh.flat(2), torch.float64)} == {torch.float64}


def test_a_large_parameter_counts_for_one_member_only() -> None:
    """A bucket is not full before every member can have a parameter; a last one alone joins the bucket before."""
    params = [ParamInfo(f"p{i}", spec(5, 5), True) for i in range(5)]
    for members, names in (
        (2, ("p0 p1", "p2 p3 p4")),
        (3, ("p0 p1 p2 p3 p4",)),
        (1, ("p0", "p1", "p2", "p3", "p4")),
    ):
        found = buckets_of(params, 90, Mesh.flat(members), owners=Owners(members))
        assert [" ".join(b.names) for b in found] == list(names)
    alone = buckets_of(params, 90, Mesh.flat(2))
    assert [len(b.names) for b in alone] == [1] * 5
    padded = sum(replace(b, owners=(0,)).numel for b in alone)
    assert (
        padded
        == 5 * 2 * ALIGNMENT
        > sum(b.numel for b in buckets_of(params, 90, Mesh.flat(2), owners=Owners(2)))
    )


def test_a_parameter_across_three_shards() -> None:
    bucket = Bucket(("a", "b"), (spec(10), spec(150)), Mesh.flat(3), torch.float32)
    assert (bucket.offsets, bucket.shard, bucket.numel) == ((0, 64), 128, 384)
    assert bucket.gaps == ((10, 64), (214, 384))
    assert [list(bucket.local_shards(member)) for member in range(3)] == [
        [("a", 0, 10, 0), ("b", 0, 64, 64)],
        [("b", 64, 150, 0)],
        [],
    ]


def test_a_scalar_and_a_parameter_without_elements() -> None:
    bucket = Bucket(("scalar", "none", "row"), (spec(), spec(0, 3), spec(2)), Mesh.flat(2), torch.float32)
    tensors = {"scalar": torch.tensor(7.0), "none": torch.empty(0, 3), "row": torch.tensor([1.0, 2.0])}
    views = bucket.views(packed(bucket, tensors, CPU))
    assert [tuple(v.shape) for v in views] == [(), (0, 3), (2,)]
    assert views[0] == 7 and views[2].tolist() == [1, 2]
    assert [list(bucket.local_shards(m)) for m in (0, 1)] == [[("scalar", 0, 1, 0)], [("row", 0, 2, 0)]]


def test_only_what_is_asked_for_is_packed_and_a_missing_name_is_an_error() -> None:
    bucket = Bucket(("a",), (spec(3),), Mesh.flat(2), torch.float64)
    flat = packed(bucket, {"a": torch.ones(3), "b": torch.full((9,), 5.0)}, CPU)
    assert flat.dtype == torch.float64 and flat.sum() == 3
    with pytest.raises(KeyError):
        packed(bucket, {"b": torch.ones(3)}, CPU)


def test_a_parameter_with_holes_in_its_memory_is_packed_without_them() -> None:
    sparse = torch.arange(12.0).view(3, 4)[:, ::2]
    bucket = Bucket(("a",), (TensorSpec.of(sparse),), Mesh.flat(2), torch.float32)
    (view,) = bucket.views(packed(bucket, {"a": sparse}, CPU))
    assert torch.equal(view, sparse) and bucket.tensors[0].stride == (4, 2) and view.stride() == (2, 1)


def test_equal_buckets_are_one_key() -> None:
    one, same = (Bucket(("a",), (spec(3),), Mesh.flat(2), torch.float32) for _ in range(2))
    assert one == same and hash(one) == hash(same)
    others = [
        replace(one, mesh=Mesh.flat(3)),
        replace(one, names=("b",)),
        one.in_dtype(torch.float64),
        replace(one, tensors=(spec(4),)),
    ]
    assert all(other != one for other in others)
