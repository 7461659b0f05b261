"""What an attacker asks of the page and its routes: files of the server, other hosts, other sites, memory and disk."""

import asyncio
import json
import os

import file_server
import numpy as np
import pytest
from page_client import Visitor, send, uploaded_file
from web_making import make_service, needs_web, serving

from diff_dalle.commands.serve import AddressConfig, Limits
from diff_dalle.config import InputError
from diff_dalle.web.api import create_app
from diff_dalle.web.door import EVENT_BYTES, UPLOADS, Door, host_name
from diff_dalle.web.gradio_setup import BLOCK, holds, keep, make_room, uploads_folder
from diff_dalle.web.pictures import png
from diff_dalle.web.refusal import Refusal
from diff_dalle.web.server import with_page

pytestmark = needs_web
EDITOR, CONTROL = "Picture to edit", "Picture for the ControlNet"
PICTURE = np.full((16, 16, 3), 77, dtype=np.uint8)
SITE = {"Origin": "http://evil.example"}


@pytest.fixture(scope="module")
def service(files):
    made = make_service(files["base"], Limits(max_body=1, max_disk=1), controlnet=files["controlnet"])
    yield made
    made.close()


@pytest.fixture(scope="module")
def open_address(service):
    """The page without the door before it: what gradio itself refuses."""
    uploads_folder()
    with serving(service, with_page(create_app(service), service)) as found:
        yield found


@pytest.fixture
def used(service, monkeypatch):
    """The pictures of all that gets to be sampled."""
    seen, submit = [], service.submit
    monkeypatch.setattr(service, "submit", lambda *given: seen.append(given[1]) or submit(*given))
    return seen


@pytest.fixture
def elsewhere():
    """A picture on another server, and the paths that this was asked for."""
    with file_server.serving() as server:
        server.files["/picture.png"] = png(PICTURE)
        yield server.url("/picture.png"), server.requests


def paths_of(secret):
    """How a file of the server can be named."""
    relative = os.path.relpath(secret)
    dotted = f"{uploads_folder()}/../{os.path.relpath(secret, os.path.dirname(uploads_folder()))}"
    return [str(secret), relative, dotted, f"file://{secret}", "/etc/passwd"]


def value_with(control, file):
    return file if control == CONTROL else {"background": file, "layers": [], "composite": None}


@pytest.mark.parametrize("control", [EDITOR, CONTROL])
@pytest.mark.parametrize("door", [True, False])
def test_no_file_of_the_server_is_used(door, control, address, open_address, used, tmp_path):
    """By the door, and by gradio's own check, which ``mount_gradio_app`` leaves off."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(png(PICTURE))
    visitor = Visitor(address if door else open_address)
    visitor.values |= {"Prompt": "a star", "Steps": 1, "Edit": "Image to image"}
    for path in paths_of(secret):
        assert not door or os.path.exists(path.removeprefix("file://"))
        visitor.values[control] = value_with(control, uploaded_file(path))
        if door:
            status, answer = visitor.join("Sample", "click")
            assert status == 403 and "only pictures that were uploaded" in json.loads(answer)["error"]
        else:
            with pytest.raises(AssertionError):
                visitor.fire("Sample", "click")
    assert not used
    visitor.values[control] = value_with(control, visitor.upload(png(PICTURE)))
    visitor.fire("Sample", "click")
    (pictures,) = used
    assert [np.array_equal(picture, PICTURE) for picture in pictures.given().values()] == [True]


def test_drawings_of_the_server_are_not_used_either(address, used, tmp_path):
    visitor = Visitor(address)
    (tmp_path / "secret.png").write_bytes(png(PICTURE))
    stolen = uploaded_file(str(tmp_path / "secret.png"))
    visitor.values[EDITOR] = {"background": visitor.upload(png(PICTURE)), "layers": [stolen], "composite": None}
    assert visitor.join("Sample", "click")[0] == 403 and not used


@pytest.mark.parametrize("control", ["Prompt", EDITOR, CONTROL])
def test_no_request_is_made_to_another_host(control, address, elsewhere, used, monkeypatch):
    """Whatever control is given the address. gradio itself would refuse this machine's own, but fetch from others."""
    url, asked = elsewhere
    monkeypatch.setattr("gradio.processing_utils.async_ssrf_protected_download", fail)
    visitor = Visitor(address)
    own = visitor.upload(png(PICTURE))
    for file in (uploaded_file(url), uploaded_file(url, url=url)):
        visitor.values[control] = value_with(control, file)
        assert visitor.join("Sample", "click")[0] == 403
    visitor.values |= {"Prompt": "a star", "Steps": 1, "Edit": "Image to image"}
    visitor.values[control] = "a star" if control == "Prompt" else value_with(control, {**own, "url": url})
    visitor.fire("Sample", "click")  # the address of what was uploaded is not looked at
    for route in ("file=", "proxy=", "file/"):
        assert send(f"{visitor.prefix}/{route}{url}")[0] == 404
    assert not asked and len(used) == 1


async def fail(*arguments, **options):
    raise AssertionError("another host was asked")


def test_only_routes_that_the_page_needs_are_there(address, tmp_path):
    (tmp_path / "secret.png").write_bytes(png(PICTURE))
    for route in ("component_server", "process_recording", "run/sample", "api/sample", "call/sample", "stream/x"):
        assert send(f"{address}/gradio_api/{route}", b"{}", Content_Type="application/json")[0] == 404
    for path in ("/etc/passwd", f"{tmp_path}/secret.png", f"{uploads_folder()}/../../etc/passwd", uploads_folder()):
        assert send(f"{address}/gradio_api/file={path}")[0] == 404
    for path in ("/gradio_api/file=%00", "/gradio_api/file=/tmp/%00x", "/openapi.json", "/docs"):
        assert send(f"{address}{path}")[0] == 404
    (own,) = keep({"own.png": png(PICTURE)})
    assert send(f"{address}/gradio_api/file={own}") == (200, png(PICTURE))


@pytest.mark.parametrize("path", ["/api/sample", "/gradio_api/queue/join", "/gradio_api/upload"])
def test_pages_of_other_sites_change_nothing(path, address, used):
    port = address.rpartition(":")[2]
    wrong = [SITE, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}]
    for headers in (*wrong, {**SITE, "X-Forwarded-Host": "other.example"}):
        status, answer = send(f"{address}{path}", b"{}", **{"Content-Type": "application/json", **headers})
        assert (status, json.loads(answer)["error"]) == (403, "this request comes from the page of another site")
    right = [{}, {"Origin": address}, {"Origin": f"http://localhost:{port}", "Host": f"localhost:{port}"}]
    right += [{**SITE, "X-Forwarded-Host": "evil.example"}, {**SITE, "Sec-Fetch-Site": "same-origin"}]
    for headers in right:
        status, answer = send(f"{address}{path}", b"{", **{"Content-Type": "application/json", **headers})
        assert status == 400, answer
    assert not used


def test_another_name_of_the_server_is_refused(address):
    """Else another site's page could give its name the server's address, and read the answers."""
    for name in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "[::2]:7860", ""):
        status, answer = send(f"{address}/api/models", Host=name)
        assert status == 421 and "allowed_hosts" in json.loads(answer)["error"]
    for name in ("127.0.0.1", "LOCALHOST:1", "[::1]:7860"):
        assert send(f"{address}/api/models", Host=name)[0] == 200


def test_names_of_a_server():
    own = {"127.0.0.1", "localhost", "::1"}
    assert AddressConfig().names() == own and AddressConfig(host="0.0.0.0").names() is None
    assert AddressConfig(host="0.0.0.0", allowed_hosts=("Example.org",)).names() == {*own, "example.org"}
    assert AddressConfig(host="10.0.0.5", allowed_hosts=("box",)).names() == {"10.0.0.5", "box"}
    assert [host_name(place) for place in ("A:1", "a", "[::1]:5", "")] == ["a", "a", "::1", ""]


def test_what_the_controls_say_is_bounded(address):
    visitor = Visitor(address)
    visitor.values["Prompt"] = "x" * EVENT_BYTES
    status, answer = visitor.join("Sample", "click")
    assert status == 413 and "256 KiB" in json.loads(answer)["error"]
    assert send(f"{visitor.prefix}/queue/join", b"[" * 4000, Content_Type="application/json")[0] == 400


def test_uploads_have_a_limit_on_disk(address):
    """The oldest go."""
    visitor = Visitor(address)
    data = [os.urandom(300_000) for _ in range(8)]
    paths = [visitor.upload(each)["path"] for each in data]
    there = [os.path.exists(path) for path in paths]
    assert there == sorted(there) and there[-1] and not there[0]
    sizes = [
        os.path.getsize(os.path.join(where, name)) for where, _, names in os.walk(uploads_folder()) for name in names
    ]
    assert sum(sizes) <= (1 << 20) + 300_000
    visitor.values |= {"Edit": "Image to image", EDITOR: value_with(EDITOR, uploaded_file(paths[0]))}
    answer = visitor.sample(Prompt="a star", Steps=1)[-1]
    assert "no longer on the server: upload it again" in json.dumps(answer)


def test_room_is_made_by_age_and_small_files_count(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "file").write_bytes(b"x")
        os.utime(tmp_path / f"{i}" / "file", (i, i))
    make_room(str(tmp_path), 3 * BLOCK)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4", "5"]
    assert holds(str(tmp_path), f"{tmp_path}/5/file") and not holds(str(tmp_path), f"{tmp_path}x/file")
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert not holds(str(tmp_path), f"{tmp_path}/link")
    with pytest.raises(InputError, match="max_disk is 8, but must be at least max_body, 16"):
        Limits(max_disk=8)


def test_few_visitors_upload_at_the_same_time(tmp_path):
    door = Door(hold, None, str(tmp_path), 1 << 20)

    async def run():
        scope = {"type": "http", "method": "POST", "path": "/gradio_api/upload", "headers": []}
        first = [asyncio.ensure_future(door(scope, None, None)) for _ in range(UPLOADS)]
        await asyncio.sleep(0.1)
        with pytest.raises(Refusal, match="others are uploading pictures"):
            await door(scope, None, None)
        for each in first:
            each.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        assert not door.uploads.total

    asyncio.run(asyncio.wait_for(run(), 30))


async def hold(scope, receive, send):
    await asyncio.Event().wait()
