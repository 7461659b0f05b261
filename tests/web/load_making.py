"""Many clients at once, every third of which sends a picture. Usage, against a running server:

python tests/web/load_making.py ADDRESS PID [CLIENTS [SECONDS [HOSTILE]]]

such as ``python tests/web/load_making.py http://127.0.0.1:7860 $(pgrep -nf scripts/serve.py) 50 300 20``; beside these
clients there are so many HOSTILE ones. Prints a table in markdown of the answers and of the server's memory, and fails
if a request got no answer, or another than an image or "busy, try again".
"""

from __future__ import annotations

import base64
import collections
import io
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

PAUSE = 0.1  # seconds before a client that was told to try again does so
ROWS = 10  # of the table
EVERY = 3  # of so many clients, one sends pictures
HOSTILE = Path(__file__).with_name("hostile_making.py")
PICTURE = (1500, 2000)  # height and width: 3 megapixels


def post(address: str, body: bytes) -> int:
    """The status of the answer."""
    request = urllib.request.Request(f"{address}/api/sample", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            assert error.code != 503 or "busy, try again" in json.load(error)["error"]
        return error.code


def picture(size: tuple[int, int]) -> str:
    """A picture of this height and width as the API takes it."""
    shades = np.linspace(0, 255, size[0] * size[1] * 3).reshape(*size, 3).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(shades).save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def load(
    address: str, clients: int, seconds: float, wish: dict, counts: collections.Counter, size: tuple[int, int] = PICTURE
) -> None:
    """Count how often each status was answered to clients that ask again and again; "no answer" = none."""
    end = time.monotonic() + seconds
    edit = {"init_image": picture(size), "strength": 0.5}

    def client(number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            asked = {**wish, "seed": 1000 * number + turn, **(edit if number % EVERY == 0 else {})}
            try:
                status: int | str = post(address, json.dumps(asked).encode())
            except (OSError, AssertionError):
                status = "no answer"
            counts[status] += 1
            turn += 1
            if status != 200:
                time.sleep(PAUSE)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def resident(pid: int | str = "self") -> float:
    """MiB of memory of a process, on Linux."""
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1024


def table(address: str, pid: int, clients: int, seconds: float, hostile: int) -> collections.Counter:
    """Print the table while the load lasts. Returns the number of answers by status."""
    counts: collections.Counter = collections.Counter()
    wish = {"prompt": "a red circle"}
    thread = threading.Thread(target=load, args=(address, clients, seconds, wish, counts))
    print(f"{clients} clients, {seconds:g} s, a picture from one of {EVERY}; {hostile} hostile ones\n")
    print("| seconds | memory in MiB | images | busy | other |\n| ---: | ---: | ---: | ---: | ---: |")
    begin = time.monotonic()
    command = [sys.executable, str(HOSTILE), address, str(hostile), str(seconds)]
    subprocess.Popen(command)  # on its own, for it has much to do
    thread.start()
    while True:
        thread.join(seconds / ROWS)
        now = counts.copy()
        other = now.total() - now[200] - now[503]
        print(
            f"| {time.monotonic() - begin:.0f} | {resident(pid):.0f} | {now[200]} | {now[503]} | {other} |", flush=True
        )
        if not thread.is_alive():
            return counts


if __name__ == "__main__":
    os.nice(19)  # what clients compute, other machines would
    given = sys.argv[1:]
    if not 2 <= len(given) <= 5:
        sys.exit(__doc__)
    clients, seconds, hostile = (*given[2:], *("50", "300", "0")[len(given) - 2 :])
    found = table(given[0], int(given[1]), int(clients), float(seconds), int(hostile))
    sys.exit(f"answers by status: {dict(found)}" if set(found) - {200, 503} else 0)
