"""The safetensors reader: equal to the reference package on good files, and a named error on every bad one."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dlmrt.checkpoint.tensorfile import FileTensor, encode, read_tensors, to_float32, to_torch, write_tensors
from dlmrt.errors import CheckpointError

SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SAME_FOLDER = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(
    arrays=st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.sampled_from([np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8, np.uint8, np.bool_])
        .flatmap(lambda dtype: hnp.arrays(dtype, SHAPES)),
        max_size=5,
    )
)  # fmt: skip
@SAME_FOLDER
def test_reads_what_the_reference_package_writes(tmp_path, arrays):
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, path)
    read = read_tensors(path)
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert read[name].shape == array.shape and read[name].dtype == array.dtype.name
        np.testing.assert_array_equal(read[name].raw(), array)


@given(values=hnp.arrays(np.float32, SHAPES, elements=st.floats(width=32)), dtype=st.sampled_from(list(FLOATS)))
@SAME_FOLDER
def test_writes_what_the_reference_package_reads(tmp_path, values, dtype):
    """Any float, NaN and infinities included, is rounded as torch rounds it, from numpy and from torch alike."""
    path = tmp_path / "x.safetensors"
    wanted = torch.from_numpy(values.copy()).to(FLOATS[dtype])
    with np.errstate(over="ignore"):
        from_numpy = encode(values, dtype)
    from_torch = encode(torch.from_numpy(values.copy()), dtype)
    for bits in (from_numpy, from_torch):
        write_tensors(path, {"w": FileTensor(dtype=dtype, shape=values.shape, bits=lambda bits=bits: bits)})
        torch.testing.assert_close(safetensors.torch.load_file(path)["w"], wanted, rtol=0, atol=0, equal_nan=True)
        stored = read_tensors(path)["w"]
        torch.testing.assert_close(to_torch(stored), wanted, rtol=0, atol=0, equal_nan=True)
        np.testing.assert_array_equal(to_float32(stored), wanted.float().numpy())
        np.testing.assert_array_equal(encode(stored, dtype), stored.raw())


def good_file(path):
    """A file with two tensors; returns its bytes and the length of its header."""
    tensors = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b.weight": np.ones(4, np.float16)}
    safetensors.numpy.save_file(tensors, path)
    blob = path.read_bytes()
    return blob, struct.unpack("<Q", blob[:8])[0]


@given(fraction=st.floats(0, 1, exclude_max=True))
@SAME_FOLDER
def test_every_truncation_names_the_file(tmp_path, fraction):
    """K30: an interrupted download never loads."""
    path = tmp_path / "cut.safetensors"
    blob, _ = good_file(path)
    path.write_bytes(blob[: int(fraction * len(blob))])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        read_tensors(path)


@given(data=st.data())
@SAME_FOLDER
def test_every_corrupted_header_names_the_file_or_describes_the_same_bytes(tmp_path, data):
    """No change of header bytes crashes, or reads outside the file, or lets two tensors share bytes."""
    path = tmp_path / "bad.safetensors"
    blob, header_length = good_file(path)
    changed = bytearray(blob)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, 7 + header_length))] = data.draw(st.integers(0, 255))
    path.write_bytes(changed)
    try:
        tensors = read_tensors(path)
    except CheckpointError as error:
        assert "bad.safetensors" in str(error)
    else:
        assert b"".join(tensor.raw().tobytes() for tensor in tensors.values()) == blob[8 + header_length :]


@given(blob=st.binary(max_size=200))
@SAME_FOLDER
def test_random_bytes_name_the_file(tmp_path, blob):
    path = tmp_path / "noise.safetensors"
    path.write_bytes(blob)
    with pytest.raises(CheckpointError, match=r"noise\.safetensors"):
        read_tensors(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "size", "named"),
    [
        ([], 0, "not an object"),
        ({"__metadata__": 3}, 0, "__metadata__"),
        ({"w": 3}, 8, "'w'"),
        ({"w": {"dtype": "F32", "shape": [2]}}, 8, "data_offsets"),
        ({"w": {**entry(), "stride": 1}}, 8, "'w'"),
        ({"w": entry(dtype="F31")}, 8, "unknown dtype 'F31'"),
        ({"w": entry(dtype=["F32"])}, 8, "unknown dtype"),
        ({"w": entry(shape=(-2,))}, 8, "shape"),
        ({"w": entry(shape=(2.0,))}, 8, "shape"),
        ({"w": entry(shape=(True, 2))}, 8, "shape"),
        ({"w": entry(shape=(2**62, 2**62))}, 8, "needs"),
        ({"w": entry(shape=(10**4000, 10**4000))}, 8, "shape"),
        ({"w": entry(shape=(2**62,) * 200)}, 8, "more bytes than there can be"),
        ({"w": entry(offsets=(8, 0))}, 8, "lies at 8..0"),
        ({"w": entry(offsets=(0, 16), shape=(4,))}, 8, "lies at 0..16 of 8"),
        ({"w": entry(shape=(3,))}, 8, "needs 12 bytes"),
        ({"w": entry(offsets=(4, 12))}, 12, "begins at data byte 4, expected 0"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "'b' begins at data byte 4, expected 8"),
        ({"a": entry()}, 12, "end at data byte 8 of 12"),
    ],
)
def test_inconsistent_header_names_file_and_fault(tmp_path, header, size, named):
    path = tmp_path / "odd.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_tensors(path)
    assert str(path) in str(caught.value) and "download" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b'{"w":1,"w":2}', "twice"),
        (b"\xff{}", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"w":' + b"9" * 9999 + b"}", "JSON"),
    ],
)
def test_header_that_is_not_json(tmp_path, text, named):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=named):
        read_tensors(path)


def test_absent_file_folder_and_pipe(tmp_path):
    """None of them is waited for, and a name that no file system can hold is no crash."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    os.symlink("loop.safetensors", tmp_path / "loop.safetensors")
    names = ("none.safetensors", "", "pipe.safetensors", "loop.safetensors", "x" * 300)
    for path in (tmp_path / name for name in names):
        with pytest.raises(CheckpointError, match="cannot read"):
            read_tensors(path)


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors"])
def test_a_name_that_is_no_file_name(tmp_path, name):
    with pytest.raises(CheckpointError, match="not a file name"):
        read_tensors(tmp_path / name)


@pytest.mark.parametrize("change", ["cut", "gone", "rewritten"])
def test_a_file_that_changes_while_it_is_used_is_named(tmp_path, change):
    """A mapped file would end the process here (SIGBUS), or hand out bytes of two files."""
    path = tmp_path / "w.safetensors"
    write_tensors(path, {"w": FileTensor(dtype="float32", shape=(4096,), bits=lambda: np.ones(4096, np.float32))})
    tensor = read_tensors(path)["w"]
    before = path.read_bytes()
    if change == "rewritten":
        path.write_bytes(before)
        os.utime(path, ns=(0, 0))
    else:
        os.truncate(path, 0 if change == "gone" else len(before) // 2)
    with pytest.raises(CheckpointError, match=r"w\.safetensors was changed while it was read"):
        tensor.raw()


def test_a_file_that_is_replaced_or_deleted_stays_readable(tmp_path):
    path = tmp_path / "w.safetensors"
    for value in (1, 2):
        bits = np.full(4, value, np.float32)
        write_tensors(tmp_path / "new", {"w": FileTensor(dtype="float32", shape=(4,), bits=lambda bits=bits: bits)})
        os.replace(tmp_path / "new", path)
        if value == 1:
            tensor = read_tensors(path)["w"]
    np.testing.assert_array_equal(tensor.raw(), 1)
    path.unlink()
    np.testing.assert_array_equal(tensor.raw(), 1)
