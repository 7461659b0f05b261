"""s3:// on moto's server, and on a web server with faults."""

import boto3
import pytest
from botocore.exceptions import ClientError
from refusing import refused

from diff_dalle import storage
from diff_dalle.config import InputError
from diff_dalle.data.shards import ShardFiles
from diff_dalle.storage import objects

DATA = bytes(range(256)) * 4000


@pytest.fixture(scope="module")
def moto():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto, s3_at, request):
    s3_at(moto)
    name = f"bucket-{abs(hash(request.node.name))}"
    objects._client().create_bucket(Bucket=name)
    return f"s3://{name}"


def test_files_round_trip_and_are_listed(bucket):
    for name in ("2.tar", "1.tar", "below/3.tar", ".hidden"):
        storage.write_bytes(f"{bucket}/data/{name}", name.encode())
    storage.write_bytes(f"{bucket}/other/4.tar", b"")
    objects._client().put_object(
        Bucket=bucket.removeprefix("s3://"), Key="data/below/", Body=b""
    )  # stands for a folder
    assert storage.list_files(f"{bucket}/data") == [f"{bucket}/data/1.tar", f"{bucket}/data/2.tar"]
    found = storage.list_files(f"{bucket}/data/", recursive=True)
    assert found == [f"{bucket}/data/{name}" for name in ("1.tar", "2.tar", "below/3.tar")]
    assert all(storage.size_and_tag(path, listed=True) == storage.size_and_tag(path) for path in found)
    assert storage.read_bytes(f"{bucket}/data/1.tar") == b"1.tar"
    assert storage.read_bytes(f"{bucket}/data/1.tar", 2, 2) == b"ta"
    assert (
        storage.read_bytes(f"{bucket}/data/1.tar", 3, 20) == b"ar"
        and storage.read_bytes(f"{bucket}/data/1.tar", 9) == b""
    )
    assert storage.read_bytes(f"{bucket}/other/4.tar", 0, 5) == storage.read_bytes(f"{bucket}/other/4.tar") == b""
    with storage.open_read(f"{bucket}/data/2.tar") as stream:
        assert stream.read() == b"2.tar"
    assert storage.exists(f"{bucket}/data") and storage.exists(f"{bucket}/data/1.tar")
    storage.remove(f"{bucket}/data/1.tar")
    assert not storage.exists(f"{bucket}/data/1.tar")
    with refused(r"1\.tar does not exist"):
        storage.read_bytes(f"{bucket}/data/1.tar")
    with refused(r"s3://none-such/1\.tar is in a bucket that does not exist"):
        storage.write_bytes("s3://none-such/1.tar", b"1")


def test_a_listing_saves_a_request_for_each_file(bucket, monkeypatch):
    for i in range(5):
        storage.write_bytes(f"{bucket}/{i}.tar", bytes(i))
    heads, head = [], objects.S3.size_and_tag
    monkeypatch.setattr(objects.S3, "size_and_tag", lambda *call: heads.append(call[1]) or head(*call))
    paths = storage.list_files(bucket)
    assert [storage.size_and_tag(path, listed=True)[0] for path in paths] == list(range(5)) and not heads
    storage.write_bytes(paths[0], b"new")
    assert storage.size_and_tag(paths[0])[0] == 3 and len(heads) == 1  # the present state
    monkeypatch.setattr(storage, "LISTED_SECONDS", -1.0)
    assert storage.size_and_tag(paths[0], listed=True)[0] == 3 and len(heads) == 2


def test_another_object_of_the_same_name_is_noticed(bucket, tmp_path):
    storage.write_bytes(f"{bucket}/a.tar", DATA)
    files = ShardFiles(str(tmp_path))
    shard = files.examine(f"{bucket}/a.tar")
    assert files.read(shard, 100, 5) == DATA[100:105]
    storage.write_bytes(f"{bucket}/a.tar", DATA[::-1])
    with pytest.raises(storage.ChangedError, match=r"a\.tar has changed"):
        files.read(shard, 100, 5)
    storage.remove(f"{bucket}/a.tar")
    with pytest.raises(storage.ChangedError, match=r"a\.tar was removed"):
        files.read(shard, 100, 5)


def test_an_upload_is_repeated(bucket, monkeypatch):
    """Also one that the store found too slow: its status, 400, is otherwise that of an error of ours."""
    put = objects.S3.put

    def refusal(code: str) -> ClientError:
        return ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "PutObject")

    errors = [*[ConnectionResetError("reset by peer")] * 3, refusal("RequestTimeout")]

    def unreliable(self, *paths):
        if errors:
            raise errors.pop()
        put(self, *paths)

    monkeypatch.setattr(objects.S3, "put", unreliable)
    storage.write_bytes(f"{bucket}/a", b"log")
    assert storage.read_bytes(f"{bucket}/a") == b"log" and not errors
    errors[:] = [refusal("InvalidArgument")]
    with refused("InvalidArgument"):
        storage.write_bytes(f"{bucket}/a", b"log")


@pytest.mark.parametrize("missing", [True, False])
def test_without_access_the_variables_are_named(monkeypatch, bucket, missing, tmp_path):
    """Without keys, and where the server refuses them; a file that is not there is another matter."""
    with pytest.raises(InputError) as error:
        storage.read_bytes(f"{bucket}/nothing.pt")
    assert "AWS_" not in str(error.value)
    if missing:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{name}")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which keeps the keys
        objects._client_of.cache_clear()
    else:
        refusal = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}

        def refuse(self, *call):
            raise ClientError(refusal, "GetObject")

        monkeypatch.setattr(objects.S3, "request", refuse)
    with pytest.raises(InputError) as error:
        storage.read_bytes(f"{bucket}/a.pt")
    words = "permission denied" if not missing else "Unable to locate credentials"
    assert words in str(error.value) and "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in str(error.value)
    assert "AWS_ENDPOINT_URL)" in str(error.value)
