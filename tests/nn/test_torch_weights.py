"""Files that torch wrote, read without running them."""

import contextlib
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from regard.errors import DataError
from regard.nn.vision.torch_weights import DTYPES, MAGIC, PROTOCOL, read_torch_weights

WAYS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(table, path, *, zipped):
    torch.save(table, path, _use_new_zipfile_serialization=zipped)
    return path


def make_table():
    """Tensors of every kind that a state dict has: several of one storage, strides, none, one number."""
    torch.manual_seed(5)
    numbers = torch.randn(5, 7)
    table = OrderedDict(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).state_dict())
    table.update(whole=numbers, turned=numbers.mT, part=numbers[1:3, 2:], one=torch.tensor(3), none=torch.zeros(0, 4))
    table["parameter"] = nn.Parameter(torch.randn(3))
    for number, dtype in enumerate(DTYPES.values()):
        table[f"dtype {number}"] = torch.tensor([0, 1, 1]).to(dtype)
    return table


@WAYS
def test_every_tensor_comes_as_it_was_saved(tmp_path, zipped):
    table = make_table()
    found = read_torch_weights(save(table, tmp_path / "x.pth", zipped=zipped))
    assert list(found) == list(table)
    for name, tensor in table.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    places = {found[name].untyped_storage().data_ptr() for name in ("whole", "turned", "part")}
    assert len(places) == 1  # a storage that a small file names a thousand times is there once


@WAYS
@pytest.mark.parametrize(
    ("thing", "message"),
    [
        ({"a": 1}, "'a' is not a tensor"),
        ([torch.zeros(2)], "it holds no table of tensors"),
        ({}, "it holds no table of tensors"),
        ({"a": nn.Linear(2, 2)}, "(its program has the instruction NEWOBJ|it refers to something that is no storage)"),
        ({"inner": {"a": torch.zeros(2)}}, "'inner' is not a tensor"),
        ({3: torch.zeros(2)}, "it fills something that is no table of names"),
        ({"a": 0.5}, "its program has the instruction BINFLOAT"),
    ],
)
def test_what_is_no_table_of_tensors(tmp_path, thing, message, zipped):
    path = save(thing, tmp_path / "x.pth", zipped=zipped)
    with pytest.raises(
        DataError, match=rf"x\.pth is not a plain file of weights: {message}.*\. Convert it to safetensors\.$"
    ):
        read_torch_weights(path)


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@WAYS
def test_nothing_is_run(tmp_path, zipped):
    victim = tmp_path / "victim"
    path = save({"a": torch.zeros(2), "b": Attack(victim)}, tmp_path / "x.pth", zipped=zipped)
    with pytest.raises(DataError, match=r"it calls (io|_io|__builtin__|builtins) open, which is refused"):
        read_torch_weights(path)
    (tmp_path / "y.pth").write_bytes(pickle.dumps(Attack(victim), protocol=2))
    with pytest.raises(DataError, match="which is refused"):
        read_torch_weights(tmp_path / "y.pth")
    assert not victim.exists()


def test_a_tensor_that_is_larger_than_its_numbers(tmp_path):
    """A storage of one number seen a thousand million times would fill the memory."""
    save({"a": torch.zeros(1).expand(30_000, 30_000)}, tmp_path / "x.pth", zipped=True)
    with pytest.raises(DataError, match=r"a tensor of shape \(30000, 30000\) is larger than its storage of 1 numbers"):
        read_torch_weights(tmp_path / "x.pth")


@pytest.mark.parametrize("last", [b"Q", b"R", b"\x93", b"u", b"b", b""])
def test_things_that_hold_themselves_many_times_are_neither_printed_nor_compared(tmp_path, last):
    """A pair of a pair of a pair ..: sixty levels would take for ever to walk through."""
    doubled = b"}(" + b")" + b"q\x00h\x00\x86" * 60 + b"q\x00h\x00" + last + b"."
    (tmp_path / "x.pth").write_bytes(b"\x80\x02" + doubled)
    with pytest.raises(DataError, match="is not a plain file of weights"):
        read_torch_weights(tmp_path / "x.pth")
    start = b"".join(pickle.dumps(part, protocol=2) for part in (MAGIC, PROTOCOL, {"little_endian": True}))
    keys = b"\x80\x02](" + doubled[2:-1] + b"e."
    (tmp_path / "x.pth").write_bytes(start + b"\x80\x02" + doubled + keys)
    with pytest.raises(DataError, match="is not a plain file of weights"):
        read_torch_weights(tmp_path / "x.pth")


def test_what_is_no_file_of_torch(tmp_path):
    (tmp_path / "x.pth").write_bytes(b"hello")
    with pytest.raises(DataError, match=r"x\.pth is not a plain file of weights"):
        read_torch_weights(tmp_path / "x.pth")
    (tmp_path / "x.pth").write_bytes(b"".join(pickle.dumps(part, protocol=2) for part in (7, 8, {}, {}, [])))
    with pytest.raises(DataError, match="it does not begin as torch's files do"):
        read_torch_weights(tmp_path / "x.pth")
    with pytest.raises(DataError, match=r"nothing\.pth does not exist, expected a file of weights\."):
        read_torch_weights(tmp_path / "nothing.pth")
    with zipfile.ZipFile(tmp_path / "z.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("z/data.pkl", b"\0" * 10_000)
    with pytest.raises(DataError, match="parts of it are compressed, which torch never does"):
        read_torch_weights(tmp_path / "z.pth")


@WAYS
def test_a_file_that_is_cut_short(tmp_path, zipped):
    data = save(make_table(), tmp_path / "x.pth", zipped=zipped).read_bytes()
    for share in range(20):
        (tmp_path / "x.pth").write_bytes(data[: len(data) * share // 20])
        with pytest.raises(DataError, match="is not a plain file of weights"):
            read_torch_weights(tmp_path / "x.pth")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    table = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    return [folder / "damaged.pth"] + [
        save(table, folder / f"{zipped}.pth", zipped=zipped).read_bytes() for zipped in (False, True)
    ]


@given(st.booleans(), st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=8))
def test_damaged_files_are_read_or_refused(files, zipped, changes):
    path, *good = files
    damaged = bytearray(good[zipped])
    for place, value in changes:
        damaged[place % len(damaged)] = value
    path.write_bytes(damaged)
    with contextlib.suppress(DataError):
        assert all(isinstance(tensor, torch.Tensor) for tensor in read_torch_weights(path).values())


@given(
    st.lists(
        st.sampled_from(
            [
                bytes([code])
                for code in b"\x80\x02}]()(0eat\x85\x86\x87RQbsuh\x00q\x01K\x05X.Nccollections OrderedDict\n"
            ]
        )
    )
)
def test_any_program_ends(files, parts):
    path, *_ = files
    path.write_bytes(b"\x80\x02" + b"".join(parts) + b".")
    with pytest.raises(DataError):
        read_torch_weights(path)
