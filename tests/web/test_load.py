"""Many clients at once, some with pictures: answers are images or "busy, try again", and memory does not grow."""

import collections
import sys

import pytest
from load_making import load, resident
from web_making import make_service, needs_web, serving

from diff_dalle.commands.serve import Limits

pytestmark = needs_web
SIZE = (600, 800)  # of the pictures
GROWTH = 24  # MiB; a leak of one body or image of each request would be more


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_clients(files):
    service = make_service(files["base"], Limits(max_queue=3))
    wish = {"prompt": "a star", "steps": 2, "guidance_scale": 1.0}
    counts: collections.Counter = collections.Counter()
    with serving(service) as address:
        load(address, 50, 1.0, wish, collections.Counter(), SIZE)
        before = resident()
        load(address, 50, 2.0, wish, counts, SIZE)
        grown = resident() - before
    service.close()
    assert set(counts) <= {200, 503} and counts[200] > 0, counts
    assert grown < GROWTH
