"""The page: prompts and settings on one side, the images as they grow on the other, and what was sampled before."""

import asyncio
import html
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..config import to_dict
from ..diffusion.samplers import SAMPLERS
from .api import POLL, Service
from .models import Served
from .page_inputs import mask_of, picture_editor, picture_upload
from .refusal import Refusal
from .wish import Pictures, Wish
from .worker import Job, Snapshot

HISTORY = 24  # images that a visitor's history keeps
PREVIEW_SECONDS = 0.12  # between two previews
VISIT_SECONDS = 3600  # after which what a visitor has is forgotten
EDITS = {
    "Inpaint what is drawn": "mask",
    "Image to image": "strength",
    "Variations": "variation",
}
CSS = """
.images img { image-rendering: pixelated; }
.images .grid-wrap { min-height: 8em; padding-top: 2.4em; }
.images .empty { min-height: 8em; }
.status { min-height: 3.2em; }
.status progress { width: 100%; height: .7em; accent-color: #c2410c; }
"""


def status(text: str, part: float | None = None) -> str:
    """What is going on, as HTML that screen readers announce; part: how much is done, 0–1."""
    bar = "" if part is None else f'<progress max="1" value="{part:.3f}" aria-label="progress"></progress>'
    return f'<div role="status">{html.escape(text)}{bar}</div>'


def state_text(now: Snapshot) -> str:
    """A job's state as ``status``."""
    if now.refusal is not None:
        return status(now.refusal.sentence[:1].upper() + now.refusal.sentence[1:])
    if now.over:
        return status(f"Done in {now.seconds:.1f} s")
    if now.ahead:
        return status(f"Waiting: {now.ahead} before this one")
    if now.progress is None:
        return status("Starting", 0.0)
    p = now.progress
    height, width = p.stage.picture_size((p.x_start.shape[-2], p.x_start.shape[-1]))
    kind = f"Upsampling to {width}×{height}" if p.stage.is_upsampler else "Sampling"
    return status(f"{kind}: step {p.step} of {p.steps}, {now.seconds:.1f} s", p.step / p.steps)


class Visits:
    """The running job of each visitor, so that it can be stopped."""

    def __init__(self, service: Service):
        self.service = service
        self.jobs: dict[str, Job] = {}

    def stop(self, visitor: str | None) -> None:
        if job := self.jobs.pop(visitor or "", None):
            job.cancel()

    async def sample(self, visitor: str | None, wish: Wish, pictures: Pictures) -> AsyncIterator[Snapshot]:
        """Snapshots of a new job, the last of which is over. The visitor's earlier job is stopped, as is this one when
        nobody asks for the next snapshot any more."""
        self.stop(visitor)
        job = self.jobs[visitor or ""] = self.service.submit(wish, pictures)
        try:
            seen: Any = ()
            while not (now := job.snapshot()).over:
                if (now.ahead, now.progress) != seen:
                    seen = (now.ahead, now.progress)
                    yield now
                    await asyncio.sleep(PREVIEW_SECONDS)
                else:
                    await asyncio.sleep(POLL)
            yield now
        finally:
            job.cancel()
            if self.jobs.get(visitor or "") is job:
                del self.jobs[visitor or ""]


def read_wish(values: dict[str, Any], model: Served) -> tuple[Wish, Pictures]:
    """What the page's controls say, without those that the model has no use for. Raises Refusal."""
    wish = Wish(
        model=model.name,
        prompt=(values["prompt"] or "").strip() if model.has_text else "",
        negative_prompt=(values["negative"] or "").strip() if model.has_text else "",
        label=int(values["label"]) if model.num_classes else None,
        seed=_whole(values["seed"], "seed"),
        num_images=int(values["count"]),
        sampler=values["sampler"],
        steps=int(values["steps"]),
        guidance_scale=float(values["guidance"]) if model.guidable else None,
        classifier_scale=float(values["classifier"]) if model.classifier else 0.0,
        lora=tuple(f"{name}:{values['lora_factor']:g}" for name in values["loras"] or ()) if model.loras else (),
    )
    pictures = Pictures()
    if model.controlnet and values["control"] is not None:
        wish = replace(wish, control_scale=float(values["control_scale"]))
        pictures = replace(pictures, control_image=values["control"])
    editor = values["editor"]
    if editor is not None:
        pictures = replace(pictures, init_image=editor[0])
        kind = EDITS[values["edit"]]
        if kind == "mask":
            if editor[1] is None or not editor[1].any():
                raise Refusal(400, "draw over the part of the picture that is to be inpainted, or choose another edit")
            pictures = replace(pictures, mask=mask_of(editor[1]))
        else:
            amount: dict[str, Any] = {kind: float(values["amount"])}
            wish = replace(wish, **amount)
    return wish, pictures


def values_of(wish: dict[str, Any]) -> dict[str, Any]:
    """What the page's controls say for a wish, as a dict: the inverse of ``read_wish``, without its pictures."""
    names = {"model": "model", "prompt": "prompt", "negative": "negative_prompt", "seed": "seed"}
    names |= {"count": "num_images", "sampler": "sampler", "steps": "steps", "classifier": "classifier_scale"}
    values = {name: wish[key] for name, key in names.items()}
    optional = {"label": "label", "guidance": "guidance_scale"}
    values |= {name: wish[key] for name, key in optional.items() if wish[key] is not None}
    loras = [text.rpartition(":") for text in wish["lora"]]
    values |= {"loras": [name for name, _, _ in loras], "control_scale": wish["control_scale"]}
    if loras:
        values["lora_factor"] = float(loras[0][2])
    for label, kind in EDITS.items():
        if kind in wish and wish[kind] is not None:
            values |= {"edit": label, "amount": wish[kind]}
    return values


def _whole(value: Any, name: str) -> int:
    if value is None or int(value) != value:
        raise Refusal(400, f"{name} is {value}, but must be a whole number")
    return int(value)


def record(service: Service, wish: Wish, pictures: Pictures, images: np.ndarray) -> list[dict]:
    """An entry of the history for each image."""
    entries = []
    for i, image in enumerate(images):
        one = wish if len(images) == 1 else replace(wish, seed=wish.seed + i, num_images=1)
        command, code = service.repeat(one, pictures)
        entries.append({"image": image, "wish": to_dict(one), "command": command, "python": code})
    return entries


def build_page(service: Service) -> Any:
    """The page, as gradio's Blocks."""
    import gradio as gr

    limits, served, visits = service.limits, service.models.served, Visits(service)
    first = next(iter(served.values()))
    with gr.Blocks(title="diff_dalle", analytics_enabled=False, delete_cache=(600, VISIT_SECONDS)) as page:
        gr.Markdown("# diff_dalle")
        with gr.Row():
            with gr.Column(scale=2, min_width=320):
                controls: dict[str, Any] = {"model": gr.Dropdown(list(served), value=first.name, label="Model")}
                controls["prompt"] = gr.Textbox(
                    label="Prompt", lines=2, max_length=limits.max_prompt, visible=first.has_text
                )
                controls["label"] = gr.Number(0, label="Class", precision=0, minimum=0, visible=first.num_classes > 0)
                with gr.Row():
                    start = gr.Button("Sample", variant="primary", min_width=120)
                    stop = gr.Button("Stop", min_width=80)
                with gr.Row():
                    controls["count"] = gr.Slider(1, limits.max_images, 1, step=1, label="Images", min_width=120)
                    controls["seed"] = gr.Number(0, label="Seed", precision=0, minimum=0, min_width=120)
                with gr.Accordion("Settings", open=False):
                    controls["negative"] = gr.Textbox(
                        label="Negative prompt", max_length=limits.max_prompt, visible=first.has_text
                    )
                    controls["sampler"] = gr.Dropdown(list(SAMPLERS), value=first.sampler, label="Sampler")
                    controls["steps"] = gr.Slider(1, limits.max_steps, first.steps, step=1, label="Steps")
                    controls["guidance"] = gr.Slider(
                        0, 20, first.guidance, step=0.1, label="Guidance scale (1 = off)", visible=first.guidable
                    )
                    controls["classifier"] = gr.Slider(
                        0, 10, 0, step=0.1, label="Classifier guidance (0 = off)", visible=bool(first.classifier)
                    )
                    controls["loras"] = gr.CheckboxGroup(list(first.loras), label="LoRAs", visible=bool(first.loras))
                    controls["lora_factor"] = gr.Slider(
                        -2, 2, 1, step=0.05, label="Strength of the LoRAs", visible=bool(first.loras)
                    )
                with gr.Accordion("Control by a picture", open=False, visible=bool(first.controlnet)) as control_group:
                    controls["control"] = picture_upload(limits, "Picture for the ControlNet")
                    controls["control_scale"] = gr.Slider(0, 2, 1, step=0.05, label="Strength of the control")
                with gr.Accordion("Edit a picture", open=False):
                    controls["editor"] = picture_editor(limits, "Picture to edit; draw over the part to inpaint")
                    controls["edit"] = gr.Radio(list(EDITS), value=next(iter(EDITS)), label="Edit")
                    controls["amount"] = gr.Slider(
                        0.01, 1, 0.6, step=0.01, label="Strength of image to image or of variations"
                    )
            with gr.Column(scale=3, min_width=320):
                progress = gr.HTML(status("Ready"), elem_classes="status")
                images = _gallery(gr, "Images", 2)
                stages = _gallery(gr, "Images of the earlier stages", 4, visible=first.stages > 1)
                with gr.Accordion("Repeat these images", open=False):
                    # No colors: those of gradio have too little contrast on white.
                    text: dict[str, Any] = {"language": None, "interactive": False, "wrap_lines": True, "lines": 1}
                    command = gr.Code(label="Command line", **text)
                    code = gr.Code(label="Python", **text)
                    settings = gr.Code(label="HTTP API (POST /api/sample)", **text)
                past = _gallery(gr, "History: choose an image to have its settings again", 6)
        history = gr.State([], time_to_live=VISIT_SECONDS)
        names = list(controls)

        async def sample(request: gr.Request, entries: list[dict], *values: Any) -> AsyncIterator[dict]:
            wish = pictures = None
            try:
                given = dict(zip(names, values, strict=True))
                wish, pictures = read_wish(given, service.models.find(given["model"]))
                async for now in visits.sample(request.session_hash, wish, pictures):
                    shown: dict[Any, Any] = {progress: state_text(now)}
                    if now.progress is not None and (expected := now.progress.pixels()) is not None:
                        shown[images] = list(expected)
                    if now.result is not None:
                        repeat = service.repeat(wish, pictures)
                        added = record(service, wish, pictures, now.result.images)
                        entries = [*added, *entries][:HISTORY]
                        shown |= {
                            images: list(now.result.images),
                            stages: [image for stage in now.result.stages[:-1] for image in stage],
                            command: repeat[0],
                            code: repeat[1],
                            settings: json.dumps(to_dict(wish), indent=1),
                            history: entries,
                            past: _shown(entries),
                        }
                    yield shown
            except Refusal as refusal:
                yield {progress: status(refusal.sentence[:1].upper() + refusal.sentence[1:])}

        def change_model(name: str) -> dict:
            model = service.models.find(name)
            return {
                controls["prompt"]: gr.update(visible=model.has_text),
                controls["label"]: gr.update(visible=model.num_classes > 0),
                controls["negative"]: gr.update(visible=model.has_text),
                controls["sampler"]: model.sampler,
                controls["steps"]: model.steps,
                controls["guidance"]: gr.update(value=model.guidance, visible=model.guidable),
                controls["classifier"]: gr.update(value=0, visible=bool(model.classifier)),
                controls["loras"]: gr.update(choices=list(model.loras), value=[], visible=bool(model.loras)),
                controls["lora_factor"]: gr.update(visible=bool(model.loras)),
                control_group: gr.update(visible=bool(model.controlnet)),
                stages: gr.update(visible=model.stages > 1),
            }

        def choose(entries: list[dict], event: gr.SelectData) -> dict:
            entry = entries[event.index]
            shown = change_model(entry["wish"]["model"])
            for name, value in values_of(entry["wish"]).items():
                update = shown.get(controls[name])
                shown[controls[name]] = {**update, "value": value} if isinstance(update, dict) else value
            return shown | {
                command: entry["command"],
                code: entry["python"],
                settings: json.dumps(entry["wish"], indent=1),
            }

        def end(request: gr.Request) -> None:
            visits.stop(request.session_hash)

        outputs = [progress, images, stages, command, code, settings, history, past]
        private: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden"}
        gr.on(
            [start.click, controls["prompt"].submit],
            sample,
            [history, *controls.values()],
            outputs,
            concurrency_limit=None,  # the queue is ours
            **private,
        )
        stop.click(end, concurrency_limit=None, **private)
        page.unload(end)
        changed = [controls[name] for name in names if name not in ("model", "count", "seed", "control", "editor")]
        controls["model"].input(change_model, controls["model"], [*changed, control_group, stages], **private)
        again = [*controls.values(), control_group, stages, command, code, settings]
        past.select(choose, history, again, **private)
    return page.queue(api_open=False, max_size=64)


def _gallery(gr: Any, label: str, columns: int, **settings: Any) -> Any:
    """A gallery that shows small images large."""
    return gr.Gallery(
        label=label,
        columns=columns,
        fit_columns=False,
        object_fit="contain",
        format="png",
        interactive=False,
        elem_classes="images",
        buttons=["download"],
        **settings,
    )


def _shown(entries: list[dict]) -> list[tuple[np.ndarray, str]]:
    return [(entry["image"], f"{entry['wish']['prompt']} (seed {entry['wish']['seed']})") for entry in entries]
