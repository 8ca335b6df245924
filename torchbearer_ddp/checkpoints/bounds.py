"""How much a file may stand for: a few bytes can describe what takes any time or memory to load."""

from __future__ import annotations

import io
import os
import pickletools
import zipfile
from typing import Any, BinaryIO

import torch

from torchbearer_ddp import checked
from torchbearer_ddp.group import layouts
from torchbearer_ddp.group.plain_data import PlainDataWalker

_ZIP = b"PK\x03\x04"
#: A file of torch's older form begins with so many pickles.
_PICKLES = 5
#: What encoding a text, or bytes, can multiply its length by.
_GROWTH = 10
_SMALL = 10**6
_ENCODE = "_codecs encode"


def check_pickles(file: BinaryIO, where: str) -> None:
    """Reads the pickles of a file that torch would load, and builds nothing from them.

    Raises:
        Unexpected: If one of them would take time or memory that its file does not.
    """
    most = _GROWTH * os.fstat(file.fileno()).st_size + _SMALL
    file.seek(0)
    is_archive = file.read(len(_ZIP)) == _ZIP
    file.seek(0)
    if not is_archive:
        all(_check_pickle(file, where, most) for _ in range(_PICKLES))
        return
    with zipfile.ZipFile(file) as archive:
        for record in archive.infolist():
            if record.filename.lower().endswith("data.pkl"):
                _check_pickle(io.BytesIO(archive.read(record)), where, most)


def _check_pickle(file: BinaryIO, where: str, most: int) -> bool:
    """Follows a pickle with sizes in place of its values; False where it is none.

    Tuples that share their parts are hashed part by part when they are keys, and encoding what was
    encoded makes it longer each time.
    """
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "MARK":
                marks.append(stack)
                stack = []
            elif opcode.name.endswith("GET"):
                stack.append(memo[argument])
            elif opcode.name.endswith("PUT"):
                memo[argument] = stack[-1]
            else:
                taken, stack = _take(opcode.stack_before, stack, marks)
                result = _result(opcode.name, argument, taken)
                if opcode.name == "GLOBAL" and result.endswith(" bytearray"):
                    raise checked.Unexpected(f"{where} holds a bytearray, which can be of any size")
                if opcode.name.startswith("TUPLE") and result > most:
                    raise checked.Unexpected(f"{where} has a tuple of too many parts for its size")
                stack += [result] * len(opcode.stack_after)
    except checked.Unexpected:
        raise
    except Exception:  # of many kinds: torch refuses the pickle at this place as well
        return False
    return True


def _take(needed: Any, stack: list[Any], marks: list[Any]) -> tuple[list[Any], list[Any]]:
    """What an operation takes from the stack, and the stack that is left."""
    above: list[Any] = []
    count = len(needed)
    if pickletools.markobject in needed:
        above, stack, count = stack, marks.pop(), needed.index(pickletools.markobject)
    start = len(stack) - count
    return stack[start:] + above, stack[:start]


def _result(name: str, argument: Any, taken: list[Any]) -> Any:
    """The name of a function, or a size: the number of parts, and of characters."""
    if name == "GLOBAL":
        return argument
    size = 1 + sum(each for each in taken if type(each) is int)
    size += len(argument) if isinstance(argument, str) else 0
    return _GROWTH * size if name == "REDUCE" and _ENCODE in taken else size


class Census(PlainDataWalker):
    """Counts what a loaded file holds: no more parts than bytes, no more memory than there is.

    A few bytes can describe a list that holds itself, or a tensor of any size.
    """

    def __init__(self, parts: int) -> None:
        self._left = parts
        self._memory = checked.memory_of_host()

    def take(self, value: Any, where: str) -> None:
        """Checks a loaded value.

        Raises:
            Unexpected: If it is larger than its file can be, or has a tensor that cannot be used.
        """
        with checked.damage(where):
            self.walk(value, where)

    def walk(self, value: Any, where: str) -> Any:
        """Counts a part."""
        self._left -= 1
        if self._left < 0:
            raise checked.Unexpected(f"{where} has more parts than its file has bytes")
        return super().walk(value, where)

    def tensor(self, tensor: torch.Tensor, where: str) -> None:
        """Counts the memory of a tensor, and checks the indices of a sparse one."""
        if (parts := layouts.sparse_parts(tensor)) is not None:
            for part in parts:
                self.tensor(part, where)
            layouts.from_sparse_parts(tensor.layout, parts, tensor.shape, coalesced=False)
        elif layouts.is_strided(tensor):
            self._memory -= tensor.numel() * tensor.element_size()
            if self._memory < 0:
                raise checked.Unexpected(f"{where} and what is before it do not fit into memory")

    def array(self, array: Any, where: str) -> None:
        """Counts an array as a part."""

    def sequence(self, kind: type, items: list[Any]) -> None:
        """Nothing is rebuilt."""

    def mapping(self, keys: list[Any], values: list[Any]) -> None:
        """Nothing is rebuilt."""

    def other(self, value: Any, where: str) -> None:
        """Whoever uses the value says whether this is allowed there."""
