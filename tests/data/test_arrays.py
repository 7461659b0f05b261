import numpy as np
import pytest
from refusing import refused
from shard_making import npy_bytes

from diff_dalle.data.arrays import Grid, parse_header, read_embedding
from diff_dalle.images.decode import BrokenSample


def npy(header: str, version: int = 1, length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + size.to_bytes(2 if version == 1 else 4, "little") + header.encode()


def described(descr="'<f4'", order="False", shape="(2,)") -> str:
    return f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n"


@pytest.mark.parametrize("dtype", ["<f2", ">f4", "f8", "u1", "bool", "c8", "S3", "O"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_headers_are_those_that_numpy_writes(tmp_path, dtype, shape, version):
    array = np.zeros(shape, dtype, order="F" if len(shape) > 1 else "C")
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, array, version)
        end = file.tell()
    data = (tmp_path / "a.npy").read_bytes()
    found = parse_header(data)
    assert (found.shape, found.dtype) == (shape, array.dtype) and found.is_float == (array.dtype.kind == "f")
    assert found.fortran_order == (len(shape) > 1)
    if dtype != "O":
        assert found.offset == end - array.nbytes


@pytest.mark.parametrize(
    "header",
    [
        "{'shape': (2, 3), 'fortran_order': False, 'descr': '<f4'}",  # of other programs
        "{'descr':'<f4','fortran_order':False,'shape':(2L, 3L)}",
    ],
)
def test_headers_of_other_programs_are_read(header):
    assert parse_header(npy(header)).shape == (2, 3)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x00",
        b"\x93NUMPX" + npy(described())[6:],
        npy(described(), version=4),
        npy(described(), length=5000),
        npy(described(), version=2, length=2**32 - 1),
        npy(described() + " " * 40_000),
        npy("[" * 9000),
        npy("-" * 9000 + "1"),
        npy(described(descr="__import__('os').abort()")),
        npy(described(descr="[('a', '<f4')]")),
        npy(described(descr="'<f99'")),
        npy(described(order="1")),
        npy(described(shape="2")),
        npy(described(shape="(-2,)")),
        npy(described(shape="(2.0,)")),
        npy(described(shape="(" + "1, " * 33 + ")")),
        npy(described(shape="(" + "9" * 5000 + ",)")),
        npy(described(shape="(10 ** 9,)")),
    ],
    ids=range(20),
)
def test_other_headers_are_refused_without_being_evaluated(data):
    with pytest.raises(ValueError, match=r"\.npy"):
        parse_header(data)
    with pytest.raises(BrokenSample, match=r"cannot be read: .*\.npy file"):
        read_embedding("npy", data, (2,))


def test_absurd_shapes_take_no_memory():
    header = npy(described(shape="(999999999999999999, 999999999999999999)"))
    assert parse_header(header).shape == (10**18 - 1,) * 2
    with pytest.raises(BrokenSample, match=r"float32 \[999999999999999999, "):
        read_embedding("npy", header, (2,))


def test_objects_are_refused():
    class Harmful:
        def __reduce__(self):
            return pytest.fail, ("unpickled",)

    with pytest.raises(BrokenSample, match=r"its embedding is object \[2\], but must be floating-point \[2\]"):
        read_embedding("npy", npy_bytes(np.array([Harmful(), 1], dtype=object)), (2,))


# ------------------------------------------------------------------------------------------------------ maps of images


@pytest.mark.parametrize(("scale", "size"), [(1.0, (6, 3)), (0.75, (4, 2)), (0.1, (1, 1))])
def test_a_row_holds_a_map_and_its_size(scale, size):
    """Of an image of 48 × 24 pixels, in a row that is wide enough for one of 32 × 64 too."""
    grid = Grid(3, 8, scale)
    assert grid.size((48, 24)) == size and grid.pixels((48, 24)) == (8 * size[0], 8 * size[1])
    width = grid.width([(48, 24), (32, 64)])
    assert width == 2 + 3 * max(size[0] * size[1], np.prod(grid.size((32, 64))))
    maps = np.random.default_rng(0).standard_normal((2, 3, *size)).astype(np.float16)
    rows = grid.packed(maps, width)
    assert rows.shape == (2, width) and rows.dtype == np.float16
    for row, expected in zip(rows, maps, strict=True):
        assert np.array_equal(grid.unpacked(row, (48, 24)), expected)
    if scale != 0.1:
        with refused("its image of 48×24 pixels would have .*: its aspect ratio is another"):
            grid.unpacked(rows[0], (24, 48))
