import collections
import functools
import os
import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from metabridge.datasets.safe_unpickle import unpickle
from metabridge.errors import InputError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_numbers_text_and_containers_are_read_unchanged(protocol):
    data_dict = {
        "array": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "transposed": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
        "backwards": np.arange(3, dtype=">i4"),
        "words": np.array(["oak", "elm"]),
        "scalar": np.float32(2.5),
        "plain": [1, 2.5, 10**30, None, True, "déjà", b"\xff\x00", (1, (2,))],
    }
    result = unpickle(pickle.dumps(data_dict, protocol), "file.pkl")
    for name in ("array", "columns", "transposed", "backwards", "words"):
        assert np.array_equal(result[name], data_dict[name])
        assert result[name].dtype.newbyteorder("=") == data_dict[name].dtype.newbyteorder("=")
    assert result["scalar"] == data_dict["scalar"]
    assert result["plain"] == data_dict["plain"]


def test_pickles_of_python_2_and_an_old_numpy_are_read():
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I3\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x01\\xff\\x80'\ntb"
    )
    data_dict = unpickle(b"(dS'data'\n" + array + b"sS'names'\n(lS'b\\xe9b\\xe9'\nas.", "train")
    assert data_dict["data"].tolist() == [1, 255, 128]
    assert data_dict["names"] == ["bébé"]


class CallWhenLoaded:
    """An object whose pickle calls a function when `pickle.loads` reads it."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("touch {file}",), "posix.system"),
        (eval, ("open({file!r}, 'w')",), "builtins.eval"),
        (getattr, (1, "real"), "builtins.getattr"),
        (functools.partial, (print,), "functools.partial"),
        (collections.OrderedDict, (), "collections.OrderedDict"),
        (np.load, ("{file}",), "numpy.load"),
        (np.fromfile, ("{file}",), "fromfile"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_refers_to_code_is_rejected_and_nothing_is_run(tmp_path, function, arguments, name, protocol):
    file = tmp_path / "created"
    filled_arguments = [value.format(file=str(file)) if isinstance(value, str) else value for value in arguments]
    data = pickle.dumps({"data": [CallWhenLoaded(function, *filled_arguments)]}, protocol)
    with pytest.raises(InputError, match=rf"train\.pkl refers to .*{name.split('.')[-1]}, which is code") as caught:
        unpickle(data, "train.pkl")
    assert "Do not trust this file." in str(caught.value)
    assert not file.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'touch {file}'\ntR.",
        b"(S'touch {file}'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
        b"cnumpy\ndtype.__class__\n.",
        b"\x80\x04\x8c\x05numpy\x8c\x10dtype.__reduce__\x93.",
        b"cnumpy\nndarray.tofile\n.",
    ],
)
def test_every_instruction_that_names_a_global_rejects_code(tmp_path, data):
    with pytest.raises(InputError, match="which is code, not data"):
        unpickle(data.replace(b"{file}", bytes(tmp_path / "created")), "a.pkl")
    assert not Path(tmp_path, "created").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1, 2])[:-3], pickle.dumps(np.zeros(9))[:60]])
def test_a_damaged_pickle_is_rejected(data):
    with pytest.raises(
        InputError, match=r"^train\.pkl is not a valid pickle of plain data \(.+\)\. Download the file again\.$"
    ):
        unpickle(data, "train.pkl")


def test_a_reference_to_an_external_object_is_rejected():
    with pytest.raises(InputError, match=r"a\.pkl refers to an object outside the file"):
        unpickle(b"Pelsewhere\n.", "a.pkl")


def test_dtype_flags_that_make_numpy_follow_pointers_are_ignored():
    array = np.arange(3, dtype=np.uint64)
    valid_pickle = pickle.dumps(array, 2)
    flags = b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq"  # size, alignment, flags: none are set
    assert flags in valid_pickle
    forged_pickle = valid_pickle.replace(flags, b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK?tq")
    assert unpickle(forged_pickle, "a.pkl").tolist() == [0, 1, 2]


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.zeros(2, dtype=[("a", "u1")])])
def test_arrays_of_objects_and_of_records_are_rejected(array):
    with pytest.raises(InputError, match="is not a valid pickle of plain data"):
        unpickle(pickle.dumps(array, 2), "a.pkl")


def test_the_class_of_arrays_cannot_be_called():
    with pytest.raises(InputError, match="is not a valid pickle of plain data"):
        unpickle(b"cnumpy\nndarray\n(I2\ntR.", "a.pkl")


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("array", [np.zeros((0, 3)), np.array(7, dtype=np.int16), np.ones((2, 1, 3), dtype=bool)])
def test_arrays_without_elements_or_axes_are_read(array, protocol):
    result = unpickle(pickle.dumps([array, b""], protocol), "a.pkl")[0]
    assert (result.shape, result.dtype) == (array.shape, array.dtype)
    assert np.array_equal(result, array)


# Parts of hand-written pickles: a dtype of bytes, and the state of an array of eight bytes.
DTYPE = b"cnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntb"
UNBUILT = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
STATE = b"(I1\n(I8\nt" + DTYPE + b"I00\nS'AAAAAAAA'\nt"


def test_an_array_cannot_be_the_buffer_of_another():
    array = UNBUILT + STATE + b"b"
    data = b"cnumpy._core.numeric\n_frombuffer\n(" + array + DTYPE + b"(I8\ntS'C'\ntR."
    with pytest.raises(InputError, match=r"it uses numpy\._core\.numeric\._frombuffer in an unusual way"):
        unpickle(data, "a.pkl")


def test_the_state_of_an_array_is_set_once():
    assert unpickle(UNBUILT + STATE + b"b.", "a.pkl").tolist() == 8 * [65]
    with pytest.raises(InputError, match="it sets the state of an object that has none, or sets it twice"):
        unpickle(UNBUILT + STATE + b"b" + STATE + b"b.", "a.pkl")


def test_arrays_are_read_only_views_of_bytes():
    array = unpickle(pickle.dumps(np.arange(4), 4), "a.pkl")
    assert not array.flags.writeable
    assert isinstance(array.base, bytes) or isinstance(array.base.base, bytes)


@pytest.mark.parametrize(
    "data",
    [
        UNBUILT + b".",  # without a state
        UNBUILT + b"(I1\n(I9\nt" + DTYPE + b"I00\nS'AAAAAAAA'\ntb.",  # a shape of more elements than there are
        UNBUILT + b"(I1\n(I-8\nI-1\nt" + DTYPE + b"I00\nS'AAAAAAAA'\ntb.",
        UNBUILT + STATE.replace(b"u1", b"O8") + b"b.",
        UNBUILT + STATE.replace(b"u1", b"(8,)u1") + b"b.",
        UNBUILT + STATE.replace(b"u1", b"S0") + b"b.",
        b"cnumpy\ndtype\n.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x05\x97.",  # a buffer outside the pickle
        b"\x8f(K\x01\x90.",  # a set
        b"\x82\x01.",  # an extension
    ],
)
def test_instructions_that_plain_data_do_not_need_are_rejected(data):
    with pytest.raises(InputError, match=r"is not a valid pickle of plain data \(.+\)"):
        unpickle(data, "a.pkl")


def test_small_pickles_that_declare_large_data_take_little_memory():
    tracemalloc.start()
    try:
        assert unpickle(b"]r\xff\xff\xff\x01.", "a.pkl") == []  # the entry 33 554 431 of the memo
        for length in (b"\x8e" + (2**32).to_bytes(8, "little"), b"T\xff\xff\xff\x7f", b"\x8b\xff\xff\xff\x7f"):
            with pytest.raises(InputError, match="it ends too early"):
                unpickle(length + b".", "a.pkl")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def nested_pairs(levels: int) -> bytes:
    """Return nested lists, each of which contains the next one twice."""
    return b"]q\x00" + levels * b"]q\x01(h\x00h\x00eq\x00" + b"."


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (3_000_000 * b"]" + b".", "far more memory than the size of the pickle"),
        (3_000_000 * b"(" + b".", "far more memory than the size of the pickle"),
        (b"N" + 3_000_000 * b"\x94" + b".", "far more memory than the size of the pickle"),
        (100_000 * b"]" + 99_999 * b"a" + b".", "nested more than 64 deep"),
        (b")" + 100_000 * b"\x85" + b".", "nested more than 64 deep"),
        (b"]2a.", "nested more than 64 deep"),  # a list that contains itself
        (nested_pairs(40), "refers to the same data too many times"),
        (
            b"})" + 25 * b"2\x86" + b"Ns.",
            "keys are neither text nor integers",
        ),  # a tuple that takes very long to hash
        (b"}\x8a\x09" + bytes(8) + b"\x01Ns.", "keys are neither text nor integers"),
        (b"}\x8a\x04" + (2**24 + 1).to_bytes(4, "little") + b"Ns.", "keys are neither text nor integers"),
        (b"Np%d\n." % (2**61 - 1), "it has the memo index 2305843009213693951, but only 23 bytes"),
        (b"Np-1\n.", "it has the memo index -1, but only 6 bytes"),
        (b"](" + 2100 * b"N" + b"eq\0(" + 1000 * b"h\0" + b"l.", "refers to the same data too many times"),
        (b"\x8b" + (2000).to_bytes(4, "little") + 2000 * b"\x01.", "a number of 2000 bytes"),
        (b"L" + 2000 * b"1" + b"L\n.", "a number of 2001 characters"),
        (
            b"X\x00\x00\x10\x00" + 2**20 * b"a" + b"q\x000](" + 300 * b"c_codecs\nencode\n(h\x00S'latin1'\ntR" + b"e.",
            "far more memory than the size of the pickle",
        ),
    ],
)
def test_memory_depth_and_time_are_limited_by_the_size_of_the_pickle(data, reason):
    with pytest.raises(InputError, match=reason):
        unpickle(data, "a.pkl")


def test_long_lists_without_shared_parts_are_read():
    assert unpickle(b"](" + 3_000_000 * b"K\1" + b"e.", "a.pkl") == [1] * 3_000_000


def test_shared_data_are_read():
    row = ["a", "b"]
    assert unpickle(pickle.dumps([row, row, {"x": row}]), "a.pkl") == [row, row, {"x": row}]
    assert unpickle(nested_pairs(3), "a.pkl") == 2 * [2 * [[[], []]]]


def test_control_characters_in_names_are_escaped():
    with pytest.raises(InputError, match=r"refers to os\.\\x1b\[31msystem, which is code"):
        unpickle(b"cos\n\x1b[31msystem\n.", "a.pkl")


@pytest.mark.parametrize("protocol", range(6))
def test_long_lists_of_numpy_numbers_are_plain_data(protocol):
    labels = list(np.arange(100_000))
    assert unpickle(pickle.dumps(labels, protocol), "labels.pkl") == labels
