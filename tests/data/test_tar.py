import io
import tarfile

import pytest
import webdataset
from shard_making import tar_bytes

from diff_dalle.data.tar import Member, _pax_records, read_members, write_tar

LONG = "a" * 90 + "/" + "b" * 90 + "/" + "c" * 120 + ".jpg"
FILES = [("x.jpg", b"1" * 700), ("folder/", b""), ("folder/y.txt", b""), ("ü/ñ.txt", b"2" * 512), (LONG, b"3")]


def members_of(data: bytes) -> tuple[list[Member], str]:
    return read_members(lambda offset, size: data[offset : offset + size], len(data))


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_that_tarfile_finds(form):
    data = tar_bytes(FILES, form)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        expected = [(entry.name, entry.offset_data, entry.size) for entry in tar if entry.isfile()]
    assert members_of(data) == (expected, "")
    assert [data[m.offset : m.offset + m.size] for m in members_of(data)[0]] == [d for n, d in FILES if n[-1] != "/"]


def test_ustar_prefixes_and_links():
    path = "d" * 90 + "/" + "e" * 90 + ".jpg"
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        header = tarfile.TarInfo(path)
        header.size = 3
        tar.addfile(header, io.BytesIO(b"abc"))
    assert members_of(buffer.getvalue()) == ([Member(path, 1024, 3)], "")


def test_sizes_beyond_eight_gigabytes():
    """Only headers are read, so a payload of 9 GiB need not exist."""
    header = tarfile.TarInfo("big.jpg")
    header.size = 9 << 30
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        head = header.tobuf(form)
        total = len(head) + header.size + 1024

        def read(offset, size, head=head):
            return head[offset : offset + size] if offset < len(head) else bytes(size)

        assert read_members(read, total) == ([Member("big.jpg", len(head), 9 << 30)], "")


def test_a_negative_size_is_damage_and_no_endless_loop():
    data = bytearray(tar_bytes([("0.txt", b"abc")]))
    data[124:136] = b"-0000001000\0"  # -512: back to this very header
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + sum(data[156:512]) + 8 * 32)
    assert members_of(bytes(data)) == ([], "is not a tar")


def test_members_before_a_cut_or_damage_are_kept():
    data = tar_bytes([(f"{i}.txt", bytes([65 + i]) * 600) for i in range(4)])
    third = 2 * (512 + 1024)
    damaged = data[:third] + b"\xff" * 512 + data[third + 512 :]
    cases = {
        data[: third + 512 + 100]: (2, "was cut inside 2.txt: 100 of its 600 bytes are there"),
        data[:third]: (2, "was cut: its end mark is missing"),
        data[: third + 200]: (2, "was cut: its end mark is missing"),
        damaged: (2, f"is damaged at byte {third:,}"),
        b"": (0, "is empty"),
        b"hello " * 200: (0, "is not a tar"),
    }
    for broken, (count, problem) in cases.items():
        members, found = members_of(broken)
        assert (len(members), found) == (count, problem)
        assert members == members_of(data)[0][:count]


def test_written_tars_are_reproducible_and_what_webdataset_reads(tmp_path):
    samples = [("0", {"jpg": b"1" * 600, "txt": b"one"}), ("1", {"txt": b"two"})]
    for name in ("a.tar", "b.tar"):
        write_tar(str(tmp_path / name), samples)
    data = (tmp_path / "a.tar").read_bytes()
    assert data == (tmp_path / "b.tar").read_bytes()
    assert [m.name for m in members_of(data)[0]] == ["0.jpg", "0.txt", "1.txt"]
    read = webdataset.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False)
    assert [(s["__key__"], {k: v for k, v in s.items() if k[0] != "_"}) for s in read] == samples


def with_extension(payload: bytes, kind: bytes = b"x", size: int | None = None) -> bytes:
    """A tar of one extension header and a file."""
    header = tarfile.TarInfo("extension")
    header.type, header.size = kind, len(payload) if size is None else size
    return header.tobuf(tarfile.GNU_FORMAT) + payload + bytes(-len(payload) % 512) + tar_bytes([("0.txt", b"abc")])


@pytest.mark.parametrize("kind", [b"x", b"g", b"L", b"K", b"0"])
@pytest.mark.parametrize("size", [1 << 40, 2**63 - 512, 2**88 - 1])
def test_absurd_sizes_end_the_list(kind, size):
    members, problem = members_of(with_extension(b"", kind, size))
    assert members == [] and problem.startswith("was cut inside extension: ")


@pytest.mark.parametrize(
    "records",
    [
        b"",
        b" ",
        b"x" * 5000,
        b"-5 path=x\n",
        b"3 x\n",
        b"0 path=x\n",
        b"9" * 4000 + b" path=x\n",
        b"\xb2 path=x\n",
        b"12 path=\xff\n",
        b"99 path=0.txt\n",
        b"5009 size=" + b"1" * 5000 + b"\n",
        b"13 size=\xc2\xb2\n",
        b"11 size=-5\n",
    ],
    ids=range(13),
)
def test_malformed_extension_records_lose_no_file(records):
    members, problem = members_of(with_extension(records))
    assert [(member.size, problem) for member in members] == [(3, "")]


def test_extension_records_of_absurd_sizes_are_cuts():
    assert members_of(with_extension(b"24 size=9" + b"9" * 14 + b"\n"))[1].startswith("was cut inside 0.txt: ")


class Copied(bytes):
    """Counts the bytes that are copied out of it."""

    count = 0

    def _counted(self, part: bytes) -> bytes:
        Copied.count += len(part)
        return Copied(part)

    def __getitem__(self, key):
        return self._counted(super().__getitem__(key))

    def partition(self, separator):
        return tuple(map(self._counted, super().partition(separator)))


def test_very_many_extension_records_are_read_once():
    """Copying the rest after each would take minutes per header."""
    records = Copied(b"6 a=b\n" * 30_000)
    assert _pax_records(records) == {b"a": b"b"} and Copied.count <= 2 * len(records)


def test_names_are_shown_on_one_line():
    data = tar_bytes([("\x1b[2J\n" + "x" * 300, bytes(600))], tarfile.PAX_FORMAT)
    _, problem = members_of(data[: data.rindex(b"ustar") + 300])
    assert problem.isprintable() and len(problem) < 300 and "inside \\x1b[2J\\nxxx" in problem


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_name_of_megabytes_is_not_read(form):
    data = tar_bytes([("0.txt", b"abc"), ("x" * (2 << 20), b"def")], form)
    asked = []

    def read(offset, size):
        asked.append(size)
        return data[offset : offset + size]

    members, problem = read_members(read, len(data))
    assert [member.name for member in members] == ["0.txt"] and "a name of 2,097," in problem
    assert max(asked) == 512
