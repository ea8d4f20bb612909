"""The only module that uses private names of Hugging Face's datasets, tested with datasets 5, and of torchdata's
`StatefulDataLoader`, tested with torchdata 0.11.

- `IterableDataset._ex_iterable`: the source of the examples. A source has other sources in `ex_iterable` or
  `ex_iterables`. `BufferShuffledExamplesIterable` is a shuffle buffer, whose examples are not in its state.
- `IterableDataset.load_state_dict` only keeps the state. Each iteration of the same epoch number begins at it.
- With `_iterator_finished=True` in its state, the next iteration of a `StatefulDataLoader` begins at the first
  sample.
"""

from __future__ import annotations

from typing import Any


def has_shuffle_buffer(dataset: object) -> bool:
    """Return whether a data set is a stream of Hugging Face's datasets that shuffles in a buffer."""
    if not _is_stream(dataset):
        return False
    sources: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while sources:
        source = sources.pop()
        if type(source).__name__ == "BufferShuffledExamplesIterable":
            return True
        sources += (
            [source.ex_iterable] if hasattr(source, "ex_iterable") else getattr(source, "ex_iterables", [])
        )
    return False


def forget_state(dataset: Any) -> None:
    """Let the next iteration of a stream of Hugging Face's datasets begin at its first sample. The current
    iteration continues. Other data sets stay unchanged."""
    if _is_stream(dataset):
        dataset.load_state_dict(None)


def at_epoch_end(loader: object, state: Any) -> Any:
    """Return a loader's state for the next epoch, if an epoch ends with this state, such as at
    `limit_train_batches`. Return None if the loader then needs no state."""
    kind = type(loader)
    if not kind.__module__.startswith("torchdata.") or not isinstance(state, dict):
        return state
    return None if _is_stream(getattr(loader, "dataset", None)) else {**state, "_iterator_finished": True}


def _is_stream(dataset: object) -> bool:
    kind = type(dataset)
    return kind.__module__.startswith("datasets.") and kind.__name__ == "IterableDataset"
