"""The page: prompts and settings on one side, the images as they grow on the other, and what was sampled before."""

import asyncio
import html
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from ..commands.serve import Limits
from ..config import InputError
from ..diffusion.samplers import SAMPLERS
from ..sampling.stage_settings import BASE, STAGE_B, UPSAMPLERS
from .api import POLL, Service
from .models import Served
from .page_values import (
    CHANGING,
    EDITS,
    LONGEST,
    MORE,
    downloads,
    is_used,
    label_of,
    read_wish,
    record,
    repeated,
    request_text,
    values_of,
)
from .pictures import PictureFiles, Pictures, editor_value, picture_editor, picture_upload
from .refusal import Refusal
from .wish import LEAVES, Wish, check_wish, size_asked
from .worker import Job, Snapshot

GROUPS = {BASE: "More settings", UPSAMPLERS: "Upsamplers", STAGE_B: "Stage B"}
USUAL = "as the checkpoint says"
HISTORY = 24  # images that a visitor's history keeps
PREVIEW_SECONDS = 0.12  # between two previews
ABSENT_SECONDS = 5.0  # after which the job of a visitor who does not listen is canceled
VISIT_SECONDS = 3600  # after which what a visitor has is forgotten
CSS = """
.images img { image-rendering: pixelated; }
.images .grid-wrap { min-height: 8em; padding-top: 2.4em; }
.status { min-height: 3.2em; }
.cm-gutters { display: none !important; }
"""


def status(text: str, part: float | None = None) -> str:
    """What is going on, as HTML that screen readers announce; part: how much is done, 0–1."""
    bar = "" if part is None else f'<progress max="1" value="{part:.3f}" aria-label="progress"></progress>'
    return f'<div role="status">{html.escape(text)}{bar}</div>'


def refused(error: InputError) -> str:
    sentence = error.message(label_of)
    return status(sentence[:1].upper() + sentence[1:])


def state_text(now: Snapshot, count: int) -> str:
    """The state of a job of so many images as ``status``."""
    if now.refusal is not None:
        return refused(now.refusal)
    if now.over:
        return status(f"Done in {now.seconds:.1f} s")
    if now.ahead:
        return status(f"Waiting: {now.ahead} before this one")
    if now.progress is None:
        return status("Starting", 0.0)
    p = now.progress
    height, width = p.stage.picture_size((p.x_start.shape[-2], p.x_start.shape[-1]))
    kind = f"Upsampling to {width}×{height}" if p.stage.is_upsampler else "Sampling"
    first, last = p.index[0] + 1, p.index[-1] + 1
    if last - first + 1 < count:
        kind += f" image {first}" if first == last else f" images {first} to {last}"
        kind += f" of {count}"
    done = (p.index[0] + len(p.index) * p.step / p.steps) / count
    return status(f"{kind}: step {p.step} of {p.steps}, {now.seconds:.1f} s", done)


class Visits:
    """The running job of each visitor, so that it can be stopped."""

    def __init__(self, service: Service):
        self.service = service
        self.jobs: dict[str, Job] = {}

    def stop(self, visitor: str | None) -> None:
        if job := self.jobs.pop(visitor or "", None):
            job.cancel()

    async def sample(
        self, visitor: str | None, wish: Wish, files: PictureFiles, client: str | None = None
    ) -> AsyncIterator[Snapshot]:
        """Snapshots of a new job, the last of which is over. The visitor's earlier job is stopped, as is this one when
        nobody asks for the next snapshot any more, or the visitor does not listen. client: the visitor's address."""
        self.stop(visitor)
        service, visitor = self.service, visitor or ""
        with service.jobs_each.hold(client):
            with service.worker.place() as place:
                size, pictures = size_asked(wish, check_wish(wish, service.models, service.limits)), Pictures()
                if files.files:
                    pictures = await service.read(files.read, size, service.limits)
                job = self.jobs[visitor] = service.submit(wish, pictures, place)
            try:
                seen: Any = ()
                heard = time.monotonic()
                while not (now := job.snapshot()).over:
                    if service.listening is None or visitor in service.listening:
                        heard = time.monotonic()
                    elif time.monotonic() - heard > ABSENT_SECONDS:
                        raise Refusal(499, "the visitor went away")
                    if (now.ahead, now.progress) != seen:
                        seen = (now.ahead, now.progress)
                        yield now
                        await asyncio.sleep(PREVIEW_SECONDS)
                    else:
                        await asyncio.sleep(POLL)
                yield now
            finally:
                job.cancel()
                if self.jobs.get(visitor) is job:
                    del self.jobs[visitor]


def looks_of(model: Served, limits: Limits) -> dict[Any, dict[str, Any]]:
    """What the parts of the page that depend on the model show: controls by their names, and groups of them."""
    looks: dict[Any, dict[str, Any]] = {name: {"visible": is_used(name, model)} for name in CHANGING}
    looks |= {kind: {"visible": kind in model.kinds} for kind in GROUPS}
    looks["control"] = {"visible": bool(model.controlnet)}
    looks |= {"sampler": {"value": model.sampler}, "steps": {"value": min(model.steps, limits.max_steps)}}
    looks["guidance_scale"]["value"] = model.guidance
    looks["classifier_scale"]["value"] = 0
    looks["loras"] |= {"choices": list(model.loras), "value": []}
    looks["examples"] = {"samples": [[prompt] for prompt in model.examples], "visible": bool(model.examples)}
    return looks


def build_page(service: Service) -> Any:
    """The page, as gradio's Blocks."""
    import gradio as gr

    limits, served, visits = service.limits, service.models.served, Visits(service)
    first = next(iter(served.values()))
    looks = looks_of(first, limits)
    controls: dict[str, Any] = {}
    parts: dict[Any, Any] = {}  # these, and the others that change

    def add(name: str, component: Callable[..., Any], *values: Any, **look: Any) -> None:
        made = component(*values, label=label_of(name), **look, **looks.get(name, {}))
        controls[name] = parts[name] = made

    with gr.Blocks(title="diff_dalle", analytics_enabled=False, delete_cache=(600, VISIT_SECONDS)) as page:
        gr.Markdown("# diff_dalle\nDescribe an image, or choose an example, and press **Sample**.")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                add("model", gr.Dropdown, list(served), value=first.name)
                add("prompt", gr.Textbox, lines=2, max_length=limits.max_prompt)
                examples = parts["examples"] = gr.Dataset(components=["textbox"], label="Examples", **looks["examples"])
                add("label", gr.Number, 0, precision=0, minimum=0)
                with gr.Row():
                    start = gr.Button("Sample", variant="primary", min_width=120)
                    stop = gr.Button("Stop", min_width=80)
                with gr.Row():
                    add("num_images", gr.Slider, 1, limits.max_images, 1, step=1, min_width=120)
                    add("seed", gr.Number, 0, precision=0, minimum=0, min_width=120)
            with gr.Column(scale=3, min_width=320):
                progress = gr.HTML(status("Ready"), elem_classes="status")
                images = _gallery(gr, "Images", 2)
                stages = _gallery(gr, "Images of the earlier stages", 4)
        with gr.Row():  # on a phone below the images
            with gr.Column(scale=2, min_width=320):
                with gr.Accordion("Settings", open=False):
                    add("negative_prompt", gr.Textbox, max_length=limits.max_prompt)
                    add("sampler", gr.Dropdown, list(SAMPLERS))
                    add("steps", gr.Slider, 1, limits.max_steps, step=1)
                    add("guidance_scale", gr.Slider, 0, 20, step=0.1)
                    add("classifier_scale", gr.Slider, 0, 10, step=0.1)
                    add("loras", gr.CheckboxGroup)
                    add("lora_factor", gr.Slider, -2, 2, 1, step=0.05)
                for kind, title in GROUPS.items():
                    with gr.Accordion(title, open=False, **looks[kind]) as parts[kind]:
                        for flag in MORE[kind]:  # empty as long as they are the checkpoint's
                            leaf = LEAVES[flag]
                            if leaf.choices and leaf.default is None:
                                add(flag, gr.Dropdown, [(USUAL, ""), *leaf.choices], value="", info=leaf.help)
                            else:
                                add(flag, gr.Textbox, info=leaf.help, placeholder=USUAL)
                with gr.Accordion("Control by a picture", open=False, **looks["control"]) as parts["control"]:
                    add("control_image", picture_upload)
                    add("control_scale", gr.Slider, 0, 2, 1, step=0.05)
                with gr.Accordion("Edit a picture", open=False):
                    add("init_image", picture_editor)
                    add("edit", gr.Radio, list(EDITS), value=next(iter(EDITS)))
                    add("amount", gr.Slider, 0.01, 1, 0.6, step=0.01)
            with gr.Column(scale=3, min_width=320):
                with gr.Accordion("Repeat these images", open=False):
                    # No colors: those of gradio have too little contrast on white.
                    text: dict[str, Any] = {"language": None, "interactive": False, "wrap_lines": True, "lines": 1}
                    text["show_line_numbers"] = False  # they drift from wrapped lines
                    command = gr.Code(label="Command line", **text)
                    code = gr.Code(label="Python", **text)
                    settings = gr.Code(label="HTTP API (POST /api/sample)", **text)
                    files = gr.File(
                        label="Pictures that these read, and the JSON with them",
                        file_count="multiple",
                        interactive=False,
                        visible=False,
                    )
                past = _gallery(gr, "History: choose an image for its settings", 6)
        history = gr.State([], time_to_live=VISIT_SECONDS)
        names = list(controls)

        async def sample(request: gr.Request, entries: list[dict], *values: Any) -> AsyncIterator[dict]:
            expected: dict[int, np.ndarray] = {}  # of each image, the latest
            try:
                client = request.client.host if request.client else None
                given = dict(zip(names, values, strict=True))
                wish, uploaded = read_wish(given, service.models.find(str(given["model"] or "")))
                async for now in visits.sample(request.session_hash, wish, uploaded, client):
                    shown: dict[Any, Any] = {progress: state_text(now, wish.num_images)}
                    if now.progress is not None and (pixels := now.progress.pixels()) is not None:
                        expected |= zip(now.progress.index, pixels, strict=True)
                        shown[images] = filled([expected[i] for i in sorted(expected)])
                    if (result := now.result) is not None:
                        entries = [*record(service, wish, result.pictures, result.images), *entries][:HISTORY]
                        shown |= {
                            images: filled(list(result.images)),
                            stages: filled([image for stage in result.stages[:-1] for image in stage]),
                            history: entries,
                            past: filled([entry["image"] for entry in entries]),
                            **show_repeat(repeated(service, wish, result.pictures)),
                        }
                    yield shown
            except InputError as error:
                yield {progress: refused(error)}

        def filled(shown: list) -> dict:
            return gr.update(value=shown, visible=bool(shown))

        def show_repeat(entry: dict) -> dict:
            wish, pictures = entry["wish"], entry["pictures"]
            paths = downloads(wish, pictures)
            return {
                command: entry["command"],
                code: entry["python"],
                settings: request_text(wish, pictures, LONGEST),
                files: gr.update(value=paths, visible=bool(paths)),
            }

        def change_model(name: str) -> dict:
            changed = looks_of(service.models.find(name), limits)
            return {parts[part]: gr.update(**look) for part, look in changed.items()}

        def choose(entries: list[dict], event: gr.SelectData) -> dict:
            if not isinstance(event.index, int) or not 0 <= event.index < len(entries):
                raise gr.Error("this image is no longer in the history: sample it again")
            entry = entries[event.index]
            pictures: Pictures = entry["pictures"]
            shown = change_model(entry["wish"]["model"])
            for name, value in values_of(entry["wish"], pictures.mask is not None).items():
                shown[controls[name]] = {**shown.get(controls[name], gr.update()), "value": value}
            shown |= {controls["init_image"]: editor_value(pictures), controls["control_image"]: pictures.control_image}
            return shown | show_repeat(entry)

        def end(request: gr.Request) -> None:
            visits.stop(request.session_hash)

        repeats = [command, code, settings, files]
        outputs = [progress, images, stages, *repeats, history, past]
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        gr.on(
            [start.click, controls["prompt"].submit],
            sample,
            [history, *controls.values()],
            outputs,
            concurrency_limit=None,  # the queue is ours
            preprocess=False,  # would decode pictures before there is a place in the queue, and without limits
            **private,
        )
        stop.click(end, concurrency_limit=None, **private)
        page.unload(end)
        controls["model"].input(change_model, controls["model"], [parts[part] for part in looks], **private)
        examples.click(lambda row: row[0], examples, controls["prompt"], **private)
        past.select(choose, history, [*parts.values(), *repeats], **private)
    return page.queue(api_open=False, max_size=64)


def _gallery(gr: Any, label: str, columns: int) -> Any:
    """A gallery that shows small images large, hidden until it has some: an empty one has no accessible name."""
    return gr.Gallery(
        label=label,
        columns=columns,
        fit_columns=False,
        object_fit="contain",
        format="png",
        interactive=False,
        elem_classes="images",
        buttons=["download"],
        visible=False,
    )
