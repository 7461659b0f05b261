"""Many clients at once: no answer but an image or "busy, try again", and memory that does not grow with them."""

import sys

import pytest
from checkpoint_making import make_file
from load_making import load, resident
from web_making import make_service, serving

from diff_dalle.commands.serve import Limits

pytest.importorskip("gradio", reason="the extra web is missing")
GROWTH = 24  # MiB; a leak of one body or image of each request would be more


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_clients(tmp_path):
    service = make_service(make_file(tmp_path), Limits(max_queue=3))
    wish = {"prompt": "a star", "steps": 1, "guidance_scale": 1.0}
    with serving(service) as address:
        load(address, 50, 1.0, wish)
        before = resident()
        counts = load(address, 50, 2.0, wish)
        grown = resident() - before
    service.worker.close()
    assert set(counts) <= {200, 503} and counts[200] > 0, counts
    assert grown < GROWTH
