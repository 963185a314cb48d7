import collections
import functools
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from metabridge.environments.unpickle import unpickle
from metabridge.errors import InputError


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_arrays_numbers_text_and_containers_come_back_as_they_were(protocol):
    held = {
        "array": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "turned": np.arange(24.0).reshape(2, 3, 4).transpose(1, 2, 0),
        "backwards": np.arange(3, dtype=">i4"),
        "words": np.array(["oak", "elm"]),
        "scalar": np.float32(2.5),
        "plain": [1, 2.5, 10**30, None, True, "déjà", b"\xff\x00", (1, (2,))],
    }
    back = unpickle(pickle.dumps(held, protocol), "file.pkl")
    for name in ("array", "columns", "turned", "backwards", "words"):
        assert np.array_equal(back[name], held[name])
        assert back[name].dtype.newbyteorder("=") == held[name].dtype.newbyteorder("=")
    assert back["scalar"] == held["scalar"]
    assert back["plain"] == held["plain"]


def test_pickles_of_python_2_and_an_old_numpy_are_read():
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I3\ntcnumpy\ndtype\n(S'u1'\nI0\nI1\ntR(I3\nS'|'\nNNNI-1\nI-1\nI0\ntbI00\nS'\\x01\\xff\\x80'\ntb"
    )
    held = unpickle(b"(dS'data'\n" + array + b"sS'names'\n(lS'b\\xe9b\\xe9'\nas.", "train")
    assert held["data"].tolist() == [1, 255, 128]
    assert held["names"] == ["bébé"]


class Runs:
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
def test_a_pickle_that_asks_for_code_is_refused_by_name_and_nothing_is_run(
    tmp_path, function, arguments, name, protocol
):
    file = tmp_path / "made"
    filled = [part.format(file=str(file)) if isinstance(part, str) else part for part in arguments]
    data = pickle.dumps({"data": [Runs(function, *filled)]}, protocol)
    with pytest.raises(InputError, match=rf"train\.pkl asks for .*{name.split('.')[-1]}, which is code") as caught:
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
def test_every_way_to_name_a_global_is_guarded(tmp_path, data):
    with pytest.raises(InputError, match="which is code, not data"):
        unpickle(data.replace(b"{file}", bytes(tmp_path / "made")), "a.pkl")
    assert not Path(tmp_path, "made").exists()


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps([1, 2])[:-3], pickle.dumps(np.zeros(9))[:60]])
def test_a_damaged_pickle_is_named(data):
    with pytest.raises(
        InputError, match=r"^train\.pkl is not a whole pickle of plain data \(.+\)\. Get the file again\.$"
    ):
        unpickle(data, "train.pkl")


def test_a_reference_to_something_outside_is_refused():
    with pytest.raises(InputError, match=r"a\.pkl refers to an object outside itself"):
        unpickle(b"Pelsewhere\n.", "a.pkl")


def test_a_dtype_whose_flags_would_make_numpy_follow_stray_pointers_reads_as_plain_numbers():
    array = np.arange(3, dtype=np.uint64)
    honest = pickle.dumps(array, 2)
    flags = b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tq"  # size, alignment, flags: none are set
    assert flags in honest
    forged = honest.replace(flags, b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK?tq")
    assert unpickle(forged, "a.pkl").tolist() == [0, 1, 2]


@pytest.mark.parametrize("array", [np.array([{}], dtype=object), np.zeros(2, dtype=[("a", "u1")])])
def test_arrays_of_objects_and_of_records_are_refused(array):
    with pytest.raises(InputError, match="is not a whole pickle of plain data"):
        unpickle(pickle.dumps(array, 2), "a.pkl")


def test_the_class_of_arrays_cannot_be_called():
    with pytest.raises(InputError, match="is not a whole pickle of plain data"):
        unpickle(b"cnumpy\nndarray\n(I2\ntR.", "a.pkl")
