"""Remote shards: a server that is away, busy, slow, cuts replies off, or serves another object under the same name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from file_server import FileServer, serving, unused_port

from .contract import Group, Skipped, require
from .inside import Injection, reordered
from .place import SAVED_EVERY, STEPS, Place
from .processes import Job
from .servers import S3Server, serving_s3

GROUP = Group("remote")
AWAY = 20.0  # seconds
LIMIT = 400.0  # seconds within which a run on a stalling server must go on or end
SLOW = Injection("step", SAVED_EVERY + 1, "sleep", "2")  # the faults begin while the run waits here


def _flags(place: Place) -> dict[str, Any]:
    return {"index_cache": place.path / "index", "shard_cache": place.path / "shards", "prefetch": 1}


def _begin(place: Place, job: Job) -> None:
    job.wait_until(lambda: place.logged_step() >= SAVED_EVERY, f"step {SAVED_EVERY}")


@contextlib.contextmanager
def _over_http(place: Place) -> Iterator[FileServer]:
    with serving() as server:
        server.files = {f"/{path.name}": path.read_bytes() for path in sorted(place.shards.glob("*.tar"))}
        place.data_dir = ",".join(map(server.url, server.files))
        yield server


@contextlib.contextmanager
def _over_s3(place: Place) -> Iterator[S3Server]:
    with serving_s3(place.shards) as server:
        place.data_dir = f"s3://{server.bucket}"
        yield server


Over = Callable[[Place], contextlib.AbstractContextManager[Any]]
SERVERS: dict[str, Over] = {"HTTP": _over_http, "S3": _over_s3}
GOES_ON = "goes on, nothing lost"


def _survives(place: Place, over: Over, faults: Mapping[str, int]) -> str:
    """The run goes on although the server has these faults from the middle of it on."""
    with over(place) as server:
        job = place.start(SLOW, env=getattr(server, "env", None), **_flags(place))
        _begin(place, job)
        for name, count in faults.items():
            setattr(server, name, count)
        job.wait(LIMIT).succeeded()
        require(all(getattr(server, name) < count for name, count in faults.items()), "no request met the fault")
        return f"went on, {place.equal()}"


def _changed(place: Place, over: Over) -> str:
    with over(place) as server:
        job = place.start(SLOW, env=getattr(server, "env", None), **_flags(place))
        _begin(place, job)
        for path in place.shards.glob("*.tar"):
            server.put(path.name, reordered(path.read_bytes()))
        outcome = job.wait(LIMIT)
        place.refused(outcome, ".tar")
        step = place.saved_all()
        require(step < STEPS, "it did not stop")
        return f"status 2, the shard named, saved at {step}"


for _name, _over in SERVERS.items():
    for _what, _faults in (("503, ten in a row", {"busy": 10}), ("bodies cut off, six in a row", {"cut": 6})):
        GROUP.fault(f"{_name}: {_what}", GOES_ON, every_kind=False)(partial(_survives, over=_over, faults=_faults))
    _promised = "saves and ends naming it, never other data"
    GROUP.fault(f"{_name}: another object under the same name", _promised, every_kind=False)(
        partial(_changed, over=_over)
    )


@GROUP.fault("HTTP: a body stalls", "goes on after the time-out", quick_kinds=0, every_kind=False)
def http_stalls(place: Place) -> str:
    return _survives(place, _over_http, {"stall": 1})


@GROUP.fault(f"S3: away for {AWAY:.0f} s", GOES_ON, every_kind=False)
def s3_away(place: Place) -> str:
    with _over_s3(place) as server:
        job = place.start(SLOW, env=server.env, **_flags(place))
        _begin(place, job)
        server.stop()
        time.sleep(AWAY)
        server.start()
        job.wait(LIMIT).succeeded()
        return f"went on, {place.equal()}"


@GROUP.fault("a hub that a saver uses is away", "goes on, nothing lost, says so", quick_kinds=0, every_kind=False)
def hub_away(place: Place) -> str:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise Skipped("huggingface_hub is not installed: pip install 'diff_dalle[hub]'")
    saver = {"save_to": "huggingface", "huggingface_repo": "me/it", "save_latest_to": "latest.pth"}
    config = place.path / "savers.json"
    config.write_text(json.dumps({"tracking": {"savers": [saver]}}))
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{unused_port()}", "HF_TOKEN": "drill"}
    outcome = place.start(env=env, config=config).wait(LIMIT).succeeded()
    require("latest.pth was not saved" in outcome.output, "the failure was not reported")
    kept = list((place.logdir / "uploads").rglob("latest.pth"))
    require(len(kept) == 1, "the file does not wait for the next session")
    return f"went on, {place.equal()}"
