"""The servers of the drill: each fault is met as often as asked for."""

import http.client
import urllib.request

import pytest
from file_server import serving

from drills.contract import Skipped
from drills.servers import serving_s3

DATA = bytes(range(200))


def test_a_body_stalls_once():
    with serving() as server:
        server.files, server.stall = {"/a": DATA}, 1
        reply = urllib.request.urlopen(server.url("/a"), timeout=0.5)
        assert reply.read(100) == DATA[:100]
        with pytest.raises((TimeoutError, http.client.IncompleteRead)):
            reply.read()
        with urllib.request.urlopen(server.url("/a"), timeout=60) as reply:
            assert reply.read() == DATA


def test_s3_is_served_with_faults_and_again_after_a_stop(tmp_path):
    (tmp_path / "a.tar").write_bytes(DATA)
    try:
        with serving_s3(tmp_path) as server:
            client = server._client()

            def read():
                return client.get_object(Bucket=server.bucket, Key="a.tar")["Body"].read()

            assert read() == DATA
            server.busy = 1
            assert read() == DATA and not server.busy  # the client tries again
            server.cut = 1
            with pytest.raises(Exception, match="IncompleteRead|Connection broken|100"):
                read()
            server.stop()
            server.start()
            assert read() == DATA
    except Skipped as reason:
        pytest.skip(str(reason))
