"""Remote shards: a server that is away, busy, slow, cuts replies off, or serves another object under the same name."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
from collections.abc import Iterator, Mapping
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


def _survives(place: Place, server: FileServer | S3Server, faults: Mapping[str, int], **options: Any) -> str:
    """The run goes on although the server of ``place.data_dir`` has these faults from the middle of it on."""
    job = place.start(SLOW, **options, **_flags(place))
    _begin(place, job)
    vars(server).update(faults)
    job.wait(LIMIT).succeeded()
    require(all(getattr(server, name) < count for name, count in faults.items()), "no request met the fault")
    return f"went on, {place.equal()}"


@contextlib.contextmanager
def _over_http(place: Place) -> Iterator[FileServer]:
    with serving() as server:
        server.files = {f"/{path.name}": path.read_bytes() for path in sorted(place.shards.glob("*.tar"))}
        place.data_dir = ",".join(map(server.url, server.files))
        yield server


def _survives_http(place: Place, **faults: int) -> str:
    with _over_http(place) as server:
        return _survives(place, server, faults)


@GROUP.fault("HTTP: 503, ten in a row", "goes on, nothing lost", every_kind=False)
def http_busy(place: Place) -> str:
    return _survives_http(place, busy=10)


@GROUP.fault("HTTP: bodies cut off, six in a row", "goes on, nothing lost", every_kind=False)
def http_cut(place: Place) -> str:
    return _survives_http(place, cut=6)


@GROUP.fault("HTTP: a body stalls", "goes on after the time-out", quick_kinds=0, every_kind=False)
def http_stalls(place: Place) -> str:
    return _survives_http(place, stall=1)


@GROUP.fault("HTTP: another object under the same name", "saves and ends naming it, never other data", every_kind=False)
def http_changed(place: Place) -> str:
    with _over_http(place) as server:
        job = place.start(SLOW, **_flags(place))
        _begin(place, job)
        server.files = {name: reordered(data) for name, data in server.files.items()}
        return _ended_for_change(place, job.wait(LIMIT))


def _ended_for_change(place: Place, outcome) -> str:
    place.refused(outcome, ".tar")
    step = place.saved_all()
    require(step < STEPS, "it did not stop")
    return f"status 2, the shard named, saved at {step}"


@contextlib.contextmanager
def _over_s3(place: Place) -> Iterator[S3Server]:
    with serving_s3(place.shards) as server:
        place.data_dir = f"s3://{server.bucket}"
        yield server


def _survives_s3(place: Place, **faults: int) -> str:
    with _over_s3(place) as server:
        return _survives(place, server, faults, env=server.env)


@GROUP.fault("S3: 503, ten in a row", "goes on, nothing lost", every_kind=False)
def s3_busy(place: Place) -> str:
    return _survives_s3(place, busy=10)


@GROUP.fault("S3: bodies cut off, six in a row", "goes on, nothing lost", every_kind=False)
def s3_cut(place: Place) -> str:
    return _survives_s3(place, cut=6)


@GROUP.fault(f"S3: away for {AWAY:.0f} s", "goes on, nothing lost", every_kind=False)
def s3_away(place: Place) -> str:
    with _over_s3(place) as server:
        job = place.start(SLOW, env=server.env, **_flags(place))
        _begin(place, job)
        server.stop()
        time.sleep(AWAY)
        server.start()
        job.wait(LIMIT).succeeded()
        return f"went on, {place.equal()}"


@GROUP.fault("S3: another object under the same name", "saves and ends naming it, never other data", every_kind=False)
def s3_changed(place: Place) -> str:
    with _over_s3(place) as server:
        job = place.start(SLOW, env=server.env, **_flags(place))
        _begin(place, job)
        for path in place.shards.glob("*.tar"):
            server.put(path.name, reordered(path.read_bytes()))
        return _ended_for_change(place, job.wait(LIMIT))


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
