"""Weights in files that `torch.save` wrote, read without running anything that such a file says.

These files are pickles: programs for a stack machine that may call any function. Here the few instructions that a plain
table of tensors needs are interpreted, with three functions that are our own; everything else is refused.
"""

import io
import math
import pickletools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError

DTYPES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}
MAGIC, PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""What a file of torch before 1.6 begins with."""
MOST_DIMENSIONS = 16
DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    OSError,
    ArithmeticError,
    RuntimeError,
    EOFError,
    struct.error,
    zipfile.BadZipFile,
)
"""What reading a damaged file raises."""


class Name(NamedTuple):
    """A class or function that the file names: `module name`."""

    text: str


class Storage(NamedTuple):
    """Numbers that lie elsewhere in the file."""

    dtype: torch.dtype
    key: str
    length: int


class Piece(NamedTuple):
    """A tensor that is not read yet: a view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_weights(path: str | Path) -> dict[str, Tensor]:
    """Name -> tensor of a file that holds a state dict, as torch wrote it before 1.6 or since (a zip)."""
    try:
        raw = Path(path).read_bytes()
        return read_zip(raw) if raw[:2] == b"PK" else read_legacy(raw)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist, expected a file of weights.") from error
    except DAMAGE as error:
        raise DataError(f"{path} is not a plain file of weights: {error}. Convert it to safetensors.") from error


def read_legacy(raw: bytes) -> dict[str, Tensor]:
    """Five pickles, then the storages in the order that the last of them tells, each behind its count."""
    stream = io.BytesIO(raw)
    magic, protocol, system, table, keys = (run_pickle(stream) for _ in range(5))
    if type(magic) is not int or magic != MAGIC or protocol != PROTOCOL:
        raise ValueError("it does not begin as torch's files do")
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise ValueError("its numbers are not little-endian")
    wanted, found = {piece.storage.key: piece.storage for piece in check_table(table).values()}, dict[str, Tensor]()
    for key in check_keys(keys):
        storage = wanted[key]
        (count,) = struct.unpack("<q", stream.read(8))
        if count != storage.length:
            raise ValueError(f"storage {key} has {count} numbers, expected {storage.length}")
        found[key] = read_numbers(storage, stream.read(count * storage.dtype.itemsize))
    return {name: cut_piece(piece, found[piece.storage.key]) for name, piece in table.items()}


def read_zip(raw: bytes) -> dict[str, Tensor]:
    """A pickle, and a file for each storage; nothing is compressed."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if any(member.compress_type != zipfile.ZIP_STORED for member in members.values()):
            raise ValueError("parts of it are compressed, which torch never does")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise ValueError("its numbers are not little-endian")
        table = check_table(run_pickle(io.BytesIO(archive.read(members["data.pkl"]))))
        storages = {piece.storage.key: piece.storage for piece in table.values()}
        found = {key: read_numbers(storage, archive.read(members[f"data/{key}"])) for key, storage in storages.items()}
    return {name: cut_piece(piece, found[piece.storage.key]) for name, piece in table.items()}


def check_table(table: Any) -> dict[str, Piece]:
    """What was unpickled, if it is a table of tensors and nothing else."""
    if not isinstance(table, dict) or not table:
        raise ValueError("it holds no table of tensors")
    for name, piece in table.items():
        if not isinstance(piece, Piece):
            raise ValueError(f"{name[:80]!r} is not a tensor")
    return table


def check_keys(keys: Any) -> list[str]:
    """What was unpickled, if it is a list of names: to compare or to print a thing that holds itself many times, as any
    other might, would take for ever."""
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("it holds no list of storages")
    return keys


def read_numbers(storage: Storage, raw: bytes) -> Tensor:
    """The numbers of a storage (count,)."""
    if len(raw) != storage.length * storage.dtype.itemsize:
        raise ValueError(f"storage {storage.key} is cut short")
    if not storage.length:
        return torch.empty(0, dtype=storage.dtype)
    return torch.frombuffer(bytearray(raw), dtype=storage.dtype)


def cut_piece(piece: Piece, numbers: Tensor) -> Tensor:
    """A tensor as a part of its storage: a file may name one many times, and no copy is made."""
    last = sum((length - 1) * stride for length, stride in zip(piece.shape, piece.strides, strict=True))
    inside = piece.offset + last < len(numbers) or not math.prod(piece.shape)
    if not inside or math.prod(piece.shape) > len(numbers):  # neither behind the end, nor one number many times
        raise ValueError(f"a tensor of shape {piece.shape} is larger than its storage of {len(numbers)} numbers")
    return numbers.as_strided(piece.shape, piece.strides, piece.offset)


# --- the stack machine -----------------------------------------------------------------------------------------------

CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE")


def run_pickle(stream: io.BytesIO) -> Any:
    """The object that one pickle describes, of plain values, tables and tensors' pieces."""
    machine = Machine()
    for instruction, argument, _ in pickletools.genops(stream):
        if instruction.name == "STOP":
            return machine.pop(1)[0]
        machine.step(instruction.name, argument)
    raise ValueError("its program has no end")


class Machine:
    """The stack, the marks on it, and the values that are kept by number."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop(self, count: int) -> list[Any]:
        """The topmost values, none of them below a mark."""
        start = len(self.stack) - count
        if start < (self.marks[-1] if self.marks else 0):
            raise ValueError("its program takes more from the stack than lies there")
        taken = self.stack[start:]
        del self.stack[start:]
        return taken

    def pop_mark(self) -> list[Any]:
        """The values above the last mark, and the mark."""
        taken = self.pop(len(self.stack) - self.marks[-1])
        self.marks.pop()
        return taken

    def step(self, name: str, argument: Any) -> None:
        """Run one instruction."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self.pop(int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(self.pop_mark()))
            case "SETITEM" | "SETITEMS":
                items = self.pop(2) if name == "SETITEM" else self.pop_mark()
                set_items(items, stack[-1])
            case "APPEND" | "APPENDS":
                items = self.pop(1) if name == "APPEND" else self.pop_mark()
                extend(items, stack[-1])
            case "GLOBAL":
                stack.append(Name(argument))
            case "STACK_GLOBAL":
                stack.append(Name(" ".join(self.pop(2))))
            case "BINPERSID":
                stack.append(find_storage(self.pop(1)[0]))
            case "REDUCE":
                stack.append(call(*self.pop(2)))
            case "BUILD":  # a state dict's own attributes: versions of modules
                self.pop(1)
            case _ if name in CONSTANTS:
                stack.append(CONSTANTS[name]())
            case _ if name in VALUES:
                stack.append(argument)
            case _:
                raise ValueError(f"its program has the instruction {name}")


def set_items(items: list[Any], table: Any) -> None:
    """Fill a table with keys and values that lie in turn."""
    if not isinstance(table, dict) or len(items) % 2 or not all(isinstance(key, str) for key in items[::2]):
        raise ValueError("it fills something that is no table of names")
    table.update(zip(items[::2], items[1::2], strict=True))


def extend(items: list[Any], row: Any) -> None:
    """Lengthen a list."""
    if not isinstance(row, list):
        raise ValueError("it lengthens something that is no list")
    row.extend(items)


def find_storage(given: Any) -> Storage:
    """The storage that a persistent id names: ("storage", class, key, device, count), and what old files add."""
    match given:
        case "storage", Name(text), str(key), _, int(count), *_ if text in DTYPES and is_count(count):
            return Storage(DTYPES[text], key, count)
    raise ValueError("it refers to something that is no storage of numbers")


def call(function: Any, arguments: Any) -> Any:
    """One of our own functions, by the name of torch's."""
    if not isinstance(function, Name) or function.text not in FUNCTIONS:
        named = function.text if isinstance(function, Name) else type(function).__name__
        raise ValueError(f"it calls {named[:80]}, which is refused")
    return FUNCTIONS[function.text](*arguments)


def view(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> Piece:
    """A tensor, as `torch._utils._rebuild_tensor_v2` makes it."""
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage) or not all(map(is_count, numbers)) or len(shape) > MOST_DIMENSIONS:
        raise ValueError("a tensor of it is no view of a storage")
    return Piece(storage, offset, tuple(shape), tuple(strides))


def is_count(number: Any) -> bool:
    """Whether something is a number of things."""
    return type(number) is int and 0 <= number < 2**40


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": lambda *_: {},
    "torch._utils _rebuild_tensor_v2": view,
    "torch._utils _rebuild_parameter": lambda piece, *_: piece,
}
