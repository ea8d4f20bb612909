"""Tensors that are sent between processes keep their bits and their strides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lightning_piper.ir.values import TensorSpec
from lightning_piper.ops.samples import restrided as restride
from lightning_piper.runtime import streams, wire
from lightning_piper.runtime.wire import packer, unpacker

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8,
    torch.int16,
          torch.int32, torch.int64, torch.complex64, torch.uint16, torch.float8_e4m3fn]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    x = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "contiguous": x,
        "transposed": x.transpose(0, 2),
        "permuted": x.permute(1, 2, 0),
        "channels last": torch.arange(48.0).reshape(2, 3, 4, 2).to(memory_format=torch.channels_last),
        "scalar": torch.tensor(3.0),
        "one sample": x[:1].transpose(0, 1),
        "empty": torch.empty(0, 3),
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).contiguous().view(torch.uint8)


def transfer(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    message = packer(spec, CPU)(x)
    assert message.is_contiguous()
    room, value = unpacker(spec, CPU)()
    assert room.shape == message.shape and room.dtype == message.dtype and room.is_contiguous()
    room.copy_(message)
    return value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_tensor_arrives_as_it_was(
    name: str, dtype: torch.dtype, as_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_as_bytes", lambda spec, device: as_bytes)
    x = tensors()[name].to(dtype)
    found = transfer(x, TensorSpec.of(x))
    assert torch.equal(bits(found), bits(x))
    assert found.dtype == dtype
    significant = [d for d in range(x.ndim) if x.shape[d] > 1]
    assert [found.stride(d) for d in significant] == [x.stride(d) for d in significant] or not x.numel()


def test_without_the_layout_strides_would_be_lost() -> None:
    x = tensors()["transposed"]
    plain = TensorSpec(tuple(x.shape), x.dtype, tuple(x.contiguous().stride()))
    found = transfer(x, plain)
    assert torch.equal(found, x) and found.stride() != x.stride()


def test_only_what_nccl_cannot_name_travels_as_bytes() -> None:
    cuda = torch.device("cuda", 0)
    as_bytes = {d for d in DTYPES if wire._as_bytes(TensorSpec((2,), d, (1,)), cuda)}
    assert as_bytes == {torch.int16, torch.uint16, torch.complex64, torch.float8_e4m3fn}
    assert not any(wire._as_bytes(TensorSpec((2,), d, (1,)), CPU) for d in DTYPES)


def test_a_number_that_is_kept_on_the_host() -> None:
    number, meta, unused = torch.tensor(2.0), torch.device("meta"), object()
    assert wire.packer(TensorSpec.of(number), meta)(number).device == meta
    assert wire.packer(TensorSpec.of(number), CPU)(number) is number
    api = SimpleNamespace(
        new_event=lambda: unused, current_stream=lambda device: Waits(), record_stream=refuse
    )
    assert streams._DeviceArrival(api).take((number,), meta) == (number,)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="recorded"):
        streams._DeviceArrival(api).take((number,), CPU)  # type: ignore[arg-type]


class Waits:
    def wait_event(self, event: object) -> None: ...


def refuse(x: torch.Tensor, stream: object) -> None:
    raise ValueError("recorded")


def test_restride() -> None:
    x = torch.randn(2, 3)
    assert restride(x, TensorSpec.of(x)) is x
    other = restride(x, TensorSpec((2, 3), x.dtype, (1, 2)))
    assert torch.equal(other, x) and other.stride() == (1, 2)
