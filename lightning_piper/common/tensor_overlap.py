"""Whether two tensors share elements."""

from __future__ import annotations

import torch


def share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two dense tensors, of any shapes and dtypes, have a byte of memory in common.

    Views of one tensor may share no element, for example two columns of a matrix. For views of one storage, the
    function needs host memory of the size of this storage.
    """
    storage = a.untyped_storage()
    if storage.data_ptr() != b.untyped_storage().data_ptr() or not storage.nbytes():
        return False
    marks = torch.zeros(storage.nbytes(), dtype=torch.bool)
    _bytes_of(a, marks).fill_(True)
    return bool(_bytes_of(b, marks).any())


def _bytes_of(x: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
    """Return the marks of the bytes of a tensor, as a view of the marks of all bytes of its storage."""
    shape, stride = (*x.shape, x.itemsize), (*(step * x.itemsize for step in x.stride()), 1)
    return marks.as_strided(shape, stride, x.storage_offset() * x.itemsize)
