"""s3:// on moto's server, and on a web server with faults."""

import boto3
import pytest
from botocore.exceptions import ClientError

from diff_dalle import storage
from diff_dalle.config import InputError
from diff_dalle.data.shards import ShardFiles
from diff_dalle.storage import objects, retries

DATA = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def account(monkeypatch):
    for name, value in (("ACCESS_KEY_ID", "id"), ("SECRET_ACCESS_KEY", "key"), ("DEFAULT_REGION", "us-east-1")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def use(monkeypatch, endpoint: str):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    objects._client_of.cache_clear()


@pytest.fixture(scope="module")
def moto():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(moto, monkeypatch, request):
    use(monkeypatch, moto)
    name = f"bucket-{abs(hash(request.node.name))}"
    objects._client().create_bucket(Bucket=name)
    yield f"s3://{name}"
    objects._client_of.cache_clear()


@pytest.fixture
def faulty(server, monkeypatch):
    """The web server as an object store with the object s3://bucket/a."""
    use(monkeypatch, server.url(""))
    server.files["/bucket/a"] = DATA
    yield server
    objects._client_of.cache_clear()


def test_files_round_trip_and_are_listed(bucket):
    for name in ("2.tar", "1.tar", "below/3.tar", ".hidden"):
        storage.write_bytes(f"{bucket}/data/{name}", name.encode())
    storage.write_bytes(f"{bucket}/other/4.tar", b"")
    objects._client().put_object(
        Bucket=bucket.removeprefix("s3://"), Key="data/below/", Body=b""
    )  # stands for a folder
    assert storage.list_files(f"{bucket}/data") == [f"{bucket}/data/1.tar", f"{bucket}/data/2.tar"]
    found = storage.list_with_stats(f"{bucket}/data/", recursive=True)
    assert [info.path for info in found] == [f"{bucket}/data/{name}" for name in ("1.tar", "2.tar", "below/3.tar")]
    assert all((info.size, info.tag) == storage.size_and_tag(info.path) for info in found)
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
    with pytest.raises(InputError, match=r"1\.tar does not exist"):
        storage.read_bytes(f"{bucket}/data/1.tar")
    with pytest.raises(InputError, match=r"s3://none-such/1\.tar is in a bucket that does not exist"):
        storage.write_bytes("s3://none-such/1.tar", b"1")


def test_a_listing_saves_a_request_for_each_file(bucket, monkeypatch):
    for i in range(5):
        storage.write_bytes(f"{bucket}/{i}.tar", bytes(i))
    heads, head = [], objects.S3.size_and_tag
    monkeypatch.setattr(objects.S3, "size_and_tag", lambda *call: heads.append(call[1]) or head(*call))
    paths = storage.list_files(bucket)
    assert [storage.size_and_tag(path, listed=True)[0] for path in paths] == list(range(5)) and not heads
    storage.list_with_stats(bucket)
    assert not heads
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


def test_a_body_that_breaks_off_goes_on_where_it_ended(faulty):
    faulty.cut = 5
    assert storage.read_bytes("s3://bucket/a") == DATA and faulty.cut == 0
    assert faulty.sent == len(DATA) and faulty.headers[1]["Range"].startswith("bytes=512000-")
    assert faulty.headers[1]["If-Match"]  # of the same version


def test_a_third_of_refused_requests_does_no_harm(faulty):
    faulty.busy_share = 0.3
    for i in range(20):
        assert storage.read_bytes("s3://bucket/a", i, 3) == DATA[i : i + 3]
    assert len(faulty.requests) > 22


def test_a_store_that_stays_away_is_given_up(faulty, monkeypatch):
    faulty.busy_share = 1.0
    with pytest.raises(storage.UnavailableError, match=r"s3://bucket/a is not available .*503"):
        storage.read_bytes("s3://bucket/a", 0, 5)
    faulty.busy_share, requests = 0.0, len(faulty.requests)
    with pytest.raises(InputError, match="b does not exist"):
        storage.read_bytes("s3://bucket/b", 0, 5)
    assert len(faulty.requests) == requests + 1  # what is not temporary is asked once


def test_a_silent_store_is_given_up(faulty, monkeypatch):
    monkeypatch.setattr(objects, "SILENT_SECONDS", 0.1)
    objects._client_of.cache_clear()
    faulty.silent = True
    assert objects._client().meta.config.connect_timeout == retries.CONNECT_SECONDS
    assert objects._client().meta.config.read_timeout == 0.1
    with pytest.raises(storage.UnavailableError, match=r"[Tt]imed? ?out"):
        storage.read_bytes("s3://bucket/a", 0, 10)


def test_an_upload_is_repeated(bucket, monkeypatch):
    failures, put = [ConnectionResetError("reset by peer")] * 3, objects.S3.put

    def unreliable(self, *paths):
        if failures:
            raise failures.pop()
        put(self, *paths)

    monkeypatch.setattr(objects.S3, "put", unreliable)
    storage.write_bytes(f"{bucket}/a", b"log")
    assert storage.read_bytes(f"{bucket}/a") == b"log" and not failures


def test_a_request_that_the_store_found_too_slow_is_repeated(bucket, monkeypatch):
    """Its status, 400, is otherwise that of an error of ours."""
    put, errors = objects.S3.put, ["RequestTimeout"]

    def slow(self, *paths):
        if errors:
            reply = {"Error": {"Code": errors.pop()}, "ResponseMetadata": {"HTTPStatusCode": 400}}
            raise objects._client().exceptions.ClientError(reply, "PutObject")
        put(self, *paths)

    monkeypatch.setattr(objects.S3, "put", slow)
    storage.write_bytes(f"{bucket}/a", b"log")
    errors[:] = ["InvalidArgument"]
    with pytest.raises(InputError, match="InvalidArgument"):
        storage.write_bytes(f"{bucket}/a", b"log")


@pytest.mark.parametrize("missing", [True, False])
def test_without_access_the_variables_are_named(monkeypatch, bucket, moto, missing, tmp_path):
    """Without keys, and where the server refuses them; a file that is not there is another matter."""
    with pytest.raises(InputError) as error:
        storage.read_bytes(f"{bucket}/nothing.pt")
    assert "AWS_" not in str(error.value)
    if missing:
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.delenv(f"AWS_{name}")
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # which keeps the keys
        use(monkeypatch, moto)
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
