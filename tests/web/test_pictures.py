"""The pictures of requests: bounded in number and size from when they come until they are sampled."""

import asyncio
import concurrent.futures
import itertools
import threading

import numpy as np
import pytest
from web_making import Gate, call, client_of, make_service, needs_web

from diff_dalle.commands.serve import Limits
from diff_dalle.images.files import fit_image, fit_mask
from diff_dalle.web import api
from diff_dalle.web.api import create_app
from diff_dalle.web.pictures import base64_png, png, read_pictures

pytestmark = needs_web

PICTURE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
MASK = np.zeros((40, 60), dtype=bool)
MASK[3:9, 20:31] = True
EDIT = {
    "prompt": "a star",
    "steps": 1,
    "init_image": base64_png(PICTURE),
    "mask": base64_png(np.repeat(MASK[:, :, None] * np.uint8(255), 3, 2)),
}


@pytest.fixture
def busy(files):
    """A service that is sampling, with room for two more, its client, and what ends the sampling."""
    service, gate = make_service(files["base"], Limits(max_queue=2)), Gate()
    service.worker.submit(gate)
    assert gate.started.wait(10)
    yield service, client_of(service), gate
    gate.open.set()
    service.close()


def test_requests_beyond_the_queue_are_refused_before_their_pictures_are_decoded(busy, monkeypatch):
    """And those within it wait with small pictures."""
    service, client, gate = busy
    monkeypatch.setattr(service.jobs_each, "most", 2)
    read, reading = [], threading.Event()

    def slow(*arguments):
        reading.wait(10)
        read.append(read_pictures(*arguments))
        return read[-1]

    monkeypatch.setattr(api, "read_pictures", slow)
    with concurrent.futures.ThreadPoolExecutor(8) as clients:
        answers = [clients.submit(client.post, "/api/sample", json=EDIT) for _ in range(8)]
        done = itertools.islice(concurrent.futures.as_completed(answers, 20), 6)
        first = [each.result().status_code for each in done]
        assert first == [503] * 6 and not read
        reading.set()
        gate.open.set()
        statuses = [each.result().status_code for each in answers]
    assert sorted(statuses) == [200, 200] + [503] * 6 and len(read) == 2
    assert {picture.shape for pictures in read for picture in pictures.given().values()} == {(16, 16, 3)}


def test_the_body_of_a_refused_request_is_not_read(busy):
    service, _, _ = busy
    jobs = [service.worker.submit(print) for _ in range(2)]
    status, answer = call(create_app(service))
    assert status == 503 and "busy, try again: 2 requests" in answer["error"]
    for job in jobs:
        job.cancel()


def test_few_pictures_are_decoded_at_the_same_time(busy):
    service, together, lock = busy[0], threading.Barrier(api.READERS), threading.Lock()
    now, most = 0, 0

    def counted():
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        together.wait(10)
        with lock:
            now -= 1

    async def many():
        await asyncio.gather(*(service.read(counted) for _ in range(3 * api.READERS)))

    asyncio.run(many())
    assert most == api.READERS


def test_pictures_are_cut_as_sampling_would_cut_them():
    limits, mask = Limits(), np.repeat(MASK[:, :, None] * np.uint8(255), 3, 2)
    data = {"init_image": png(PICTURE), "control_image": png(PICTURE[:30]), "mask": png(mask)}
    found = read_pictures(data, (16, 24), limits)
    assert np.array_equal(found.init_image, fit_image(PICTURE, (16, 24)))
    assert np.array_equal(found.control_image, fit_image(PICTURE[:30], (16, 24)))
    assert np.array_equal(found.mask[:, :, 1] == 255, fit_mask(MASK, (16, 24))) and found.mask.any()
    again = read_pictures({name: png(picture) for name, picture in found.given().items()}, (16, 24), limits)
    assert all(np.array_equal(again.given()[name], picture) for name, picture in found.given().items())
