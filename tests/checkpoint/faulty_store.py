"""A store in memory whose n-th change fails: the process is killed, or the store refuses, cuts off or delays
what it is told to keep.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

KINDS = ("killed before", "killed in", "killed after", "refused", "cut off", "late")


class Killed(BaseException):
    """The end of the process. Nothing may catch it, or work after it."""


@dataclass
class Fault:
    """`position`: of the change that fails, counted from 0."""

    kind: str
    position: int


class FaultyStore(MemoryFileSystem):
    """`faulty://`. An object appears when its upload ends, whole or, at a fault, in part."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    fault: Fault | None = None
    changes: ClassVar[list[str]] = []  # the changes since `begin`
    dead = False
    bytes_read = 0
    reads = 0

    @classmethod
    def begin(cls, fault: Fault | None = None) -> None:
        """Count changes from now on, and let one fail."""
        cls.fault, cls.changes, cls.dead = fault, [], False
        cls.bytes_read = cls.reads = 0

    @classmethod
    def empty(cls) -> None:
        cls.begin()
        cls.store.clear()
        cls.pseudo_dirs[:] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("faulty://"))

    def change(self, what: str, work: Callable[[float], Any]) -> Any:
        """Do a change. `work(share)` does this share of it."""
        cls = type(self)
        if cls.dead:
            raise Killed
        cls.changes.append(what)
        kind = cls.fault.kind if cls.fault and cls.fault.position == len(cls.changes) - 1 else ""
        if kind == "refused":
            raise PermissionError("the store refuses it")
        cls.dead = kind.startswith("killed")
        if kind == "late":
            time.sleep(0.02)
        done = None if kind == "killed before" else work(0.6 if kind in ("killed in", "cut off") else 1)
        if cls.dead:
            raise Killed
        return done

    def put(self, path: str, content: bytes) -> None:
        def work(share: float) -> None:
            self.store[path] = MemoryFile(self, path, content[: int(share * len(content))])

        self.change(f"put {path}", work)

    def _open(self, path: Any, mode: str = "rb", autocommit: bool = True, **options: Any) -> Any:
        if "r" in mode:
            return super()._open(path, mode, **options)
        return Upload(self, self._strip_protocol(path), autocommit)

    def pipe_file(self, path: Any, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self.put(self._strip_protocol(path), bytes(value))

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        self.put(self._strip_protocol(path2), self.store[self._strip_protocol(path1)].getvalue())

    def _rm(self, path: Any) -> None:
        path = self._strip_protocol(path)

        def work(share: float) -> None:
            if share == 1:
                del self.store[path]

        self.change(f"delete {path}", work)

    def cat_file(self, path: Any, start: Any = None, end: Any = None, **options: Any) -> bytes:
        found: bytes = super().cat_file(path, start, end, **options)
        type(self).bytes_read += len(found)
        type(self).reads += 1
        return found


class Upload(io.BytesIO):
    def __init__(self, fs: FaultyStore, path: str, autocommit: bool) -> None:
        super().__init__()
        self.fs, self.path, self.autocommit, self.over = fs, path, autocommit, False

    def close(self) -> None:
        if self.autocommit:
            self.commit()

    def commit(self) -> None:
        if not self.over:
            self.over = True
            self.fs.put(self.path, self.getvalue())

    def discard(self) -> None:
        self.over = True

    def __del__(self) -> None:
        pass


fsspec.register_implementation("faulty", FaultyStore, clobber=True)
