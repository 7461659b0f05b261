"""The page without a browser: events are sent as its scripts send them, and what the controls say is kept."""

from __future__ import annotations

import io
import json
import urllib.error
import urllib.request
import uuid
from typing import Any

import numpy as np
from PIL import Image

MOST = 60  # seconds to wait for an answer


def send(address: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer. headers: with _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, named), timeout=MOST) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def uploaded_file(path: str, **more: Any) -> dict:
    return {"path": path, "meta": {"_type": "gradio.FileData"}, **more}


def form(data: bytes, name: str = "picture.png") -> tuple[bytes, str]:
    """The body of an upload, and its content type."""
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n'
    return (
        head.encode() + b"Content-Type: image/png\r\n\r\n" + data + b"\r\n--x--\r\n",
        "multipart/form-data; boundary=x",
    )


class Visitor:
    """values: what the controls say, by their labels; of a second one, with its kind, as "Images (gallery)".
    shown: whether each is visible."""

    def __init__(self, address: str):
        self.address, self.prefix, self.session = address, f"{address}/gradio_api", uuid.uuid4().hex
        config = json.loads(send(f"{address}/config")[1])
        self.labels: dict[int, str] = {}
        self.values: dict[str, Any] = {}
        self.shown: dict[str, Any] = {}
        for each in config["components"]:
            props = each["props"]
            label = str(props.get("label") or props.get("value") or each["type"])
            if label in self.values:
                label = f"{label} ({each['type']})"
            self.labels[each["id"]] = label
            self.values[label], self.shown[label] = props.get("value"), props.get("visible", True)
        self.events = {
            (self.labels.get(target, ""), event): each
            for each in config["dependencies"]
            for target, event in each["targets"]
        }

    def upload(self, data: bytes) -> dict:
        """Upload a file. Returns what the browser then names it by."""
        body, kind = form(data)
        status, answer = send(f"{self.prefix}/upload", body, Content_Type=kind)
        assert status == 200, answer
        return uploaded_file(json.loads(answer)[0])

    def download(self, file: dict) -> np.ndarray:
        status, data = send(file["url"])
        assert status == 200
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

    def join(self, label: str, event: str, data: Any = None, **values: Any) -> tuple[int, bytes]:
        """Send an event. values: by position among its inputs, as "at3", instead of what the controls say."""
        each = self.events[label, event]
        inputs = [self.values[self.labels[i]] for i in each["inputs"]]
        for name, value in values.items():
            inputs[int(name.removeprefix("at"))] = value
        asked = {"data": inputs, "fn_index": each["id"], "session_hash": self.session, "event_data": data}
        return send(f"{self.prefix}/queue/join", json.dumps(asked).encode(), Content_Type="application/json")

    def fire(self, label: str, event: str, data: Any = None) -> list[dict[str, Any]]:
        """Send an event and take over its answers. Returns all of them, each as new values by label."""
        from gradio_client.utils import apply_diff

        status, answer = self.join(label, event, data)
        assert status == 200, answer
        outputs = [self.labels[i] for i in self.events[label, event]["outputs"]]
        answers: list[dict[str, Any]] = []
        latest: list[Any] = []
        with urllib.request.urlopen(f"{self.prefix}/queue/data?session_hash={self.session}", timeout=MOST) as lines:
            for line in lines:
                message = json.loads(line[5:]) if line.startswith(b"data:") else {"msg": ""}
                if message["msg"] not in ("process_generating", "process_completed"):
                    continue
                assert message["success"], message["output"]
                data = message["output"].get("data", [])
                if message["msg"] == "process_generating" and latest:  # only what changed
                    data = [apply_diff(old, new) for old, new in zip(latest, data, strict=True)]
                latest = data or latest
                answers.append(dict(zip(outputs, latest, strict=True)))
                if message["msg"] == "process_completed":
                    break
        for label, value in answers[-1].items():
            if isinstance(value, dict) and value.get("__type__") == "update":
                self.shown[label] = value.get("visible", self.shown[label])
                if "value" not in value:
                    continue
                value = value["value"]
            self.values[label] = value
        return answers

    def sample(self, **values: Any) -> list[dict[str, Any]]:
        """Press the button, with these values of controls, by the first words of their labels with _ between them."""
        for name, value in values.items():
            self.values[self.label(name)] = value
        return self.fire("Sample", "click")

    def label(self, start: str) -> str:
        start = start.replace("_", " ")
        return start if start in self.values else next(label for label in self.values if label.startswith(start))
