"""Many clients at once. ``python tests/web/load_making.py ADDRESS PID CLIENTS SECONDS`` loads a running server."""

from __future__ import annotations

import collections
import json
import sys
import threading
import time
import urllib.error
import urllib.request

PAUSE = 0.1  # seconds before a client that was told to try again does so


def post(address: str, wish: dict) -> int:
    """The status of the answer."""
    body = json.dumps(wish).encode()
    request = urllib.request.Request(f"{address}/api/sample", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            assert error.code != 503 or "busy, try again" in json.load(error)["error"]
        return error.code


def load(address: str, clients: int, seconds: float, wish: dict) -> collections.Counter:
    """How often each status was answered to clients that ask again and again; "failed" = no answer."""
    counts: collections.Counter = collections.Counter()
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            try:
                status: int | str = post(address, {**wish, "seed": 1000 * number + turn})
            except (OSError, AssertionError):
                status = "failed"
            counts[status] += 1
            turn += 1
            if status != 200:
                time.sleep(PAUSE)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def resident(pid: int | str = "self") -> float:
    """MiB of memory of a process, on Linux."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    place, process, count, duration = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    result: dict = {}
    thread = threading.Thread(target=lambda: result.update(load(place, count, duration, {"prompt": "a red circle"})))
    begin = time.monotonic()
    thread.start()
    while thread.is_alive():
        print(f"{time.monotonic() - begin:5.0f} s  {resident(process):7.1f} MiB", flush=True)
        thread.join(duration / 10)
    print(result)
