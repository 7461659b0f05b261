"""The servers of the drill: right without faults, and each fault as often as asked for."""

import urllib.error
import urllib.request

import pytest

from diff_dalle.drill.contract import Skipped
from diff_dalle.drill.servers import serving_folder, serving_s3

DATA = bytes(range(200))


def fetch(url, **headers):
    request = urllib.request.Request(url, headers={name.replace("_", "-"): value for name, value in headers.items()})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, b""


@pytest.fixture
def server(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    with serving_folder(tmp_path) as server:
        yield server


def test_files_and_ranges_are_served(server):
    url = f"{server.url}/a.tar"
    status, headers, data = fetch(url)
    assert (status, data) == (200, DATA)
    status, part, data = fetch(url, Range="bytes=10-19")
    assert (status, data) == (206, DATA[10:20]) and part["Content-Range"] == "bytes 10-19/200"
    assert fetch(url, Range="bytes=500-")[0] == 416 and fetch(f"{server.url}/b")[0] == 404
    assert part["ETag"] == headers["ETag"]


def test_another_object_has_another_tag(server):
    url = f"{server.url}/a.tar"
    tag = fetch(url)[1]["ETag"]
    (server.folder / "a.tar").write_bytes(DATA[::-1] + b"x")
    assert fetch(url, If_Match=tag)[0] == 412
    assert fetch(url, Range="bytes=0-1", If_Range=tag)[2] == DATA[::-1] + b"x"


def test_each_fault_is_met_as_often_as_asked_for(server):
    url = f"{server.url}/a.tar"
    server.faults.busy = 2
    assert [fetch(url)[0] for _ in range(3)] == [503, 503, 200] and server.faults.met == 2
    server.faults.cut = 1
    with pytest.raises(Exception, match="IncompleteRead|100 bytes"):
        fetch(url)
    server.faults.stall, server.faults.seconds = 1, 0.1
    with pytest.raises(Exception, match="IncompleteRead|100 bytes"):
        fetch(url)
    assert fetch(url)[2] == DATA and server.faults.met == 4


def test_s3_is_served_with_faults_and_again_after_a_stop(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    try:
        with serving_s3(tmp_path) as server:
            client = server._client()

            def read():
                return client.get_object(Bucket=server.bucket, Key="a.tar")["Body"].read()

            assert read() == DATA
            server.faults.busy = 1
            assert read() == DATA and server.faults.met == 1  # the client tries again
            server.faults.cut = 1
            with pytest.raises(Exception, match="IncompleteRead|Connection broken|100"):
                read()
            server.stop()
            server.start()
            assert read() == DATA
    except Skipped as reason:
        pytest.skip(str(reason))
