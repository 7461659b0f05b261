"""The demo's chapter on the latent cascade: its four networks, samples and scores at several aspect ratios."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import Chapter, Demo, Job, draw_pictures, scoring_precision

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
# Width to height of the pictures: those of the buckets, which cut none of their objects. Squares are learned sooner.
RATIOS = "1/1,11/5,11/5,5/11,5/11"
WIDE = (40, 88)  # height and width of the bucket for 2:1
PICTURES = 6  # held-out ones to reconstruct
UPDATES = {"stage_a": 80, "semantic": 80, "stage_b": 60, "stage_c": 60}  # of the quick demo
TRAIN = (
    "train_cascade.py --preset cascade_{kind}_tiny --set checkpoint_path={own}/runs --set output_path={own}/previews "
    "--set webdataset_path={own}/shapes/train --set data.val_path={own}/shapes/val "
)
EFFNET, STAGE_A = "--set effnet_checkpoint_path={own}/semantic.pt ", "--set stage_a_checkpoint_path={own}/stage_a.pt "
REST, SEMANTIC = "--stage_b {own}/stage_b.pt --stage_a {own}/stage_a.pt ", "--semantic {own}/semantic.pt "
STAGE_C = "--model_path {own}/stage_c.pt "
SIZE = "--sample_size {size} "
ASKED = "--prompts {prompts} "
REQUESTS = {
    "squares": STAGE_C + REST + ASKED,
    "wide": STAGE_C + REST + ASKED + SIZE,
    "previews": STAGE_C + SEMANTIC + ASKED,
    "edited": STAGE_C + REST + SEMANTIC + "--init_image {own}/pictures/0.png --strength 0.6 " + ASKED + SIZE,
    "reconstructions": REST + SEMANTIC + "--reconstruct {own}/pictures " + SIZE,
}


def run(demo: Demo) -> Path:
    own = demo.home / "cascade"
    render = "prepare_data.py shapes --out_dir {own}/shapes --image_size 64 --aspect_ratios {ratios}"
    demo.run(render, own=own, ratios=RATIOS)

    def training(kind: str, weights: str, frozen: str = "", *after: str) -> Job:
        length = f"--set updates={UPDATES[kind]}" if demo.quick else ""
        last = own / "runs" / f"{kind}_tiny"
        words = demo.words(TRAIN + frozen + length, own=own, kind=kind)
        return Job(words, after, lambda: shutil.copy(max(last.glob(f"{weights}*.pt")), own / f"{kind}.pt"))

    demo.run_jobs(
        {
            "semantic": training("semantic", "model"),
            "stage_a": training("stage_a", "model", "", "semantic"),  # only then: A and B take less time than C
            "stage_b": training("stage_b", "ema", EFFNET + STAGE_A, "stage_a"),
            "stage_c": training("stage_c", "ema", EFFNET, "semantic"),
        }
    )

    draw_pictures(own / "pictures", own / "shapes", PICTURES, WIDE)
    for name, given in REQUESTS.items():
        size = ",".join(map(str, WIDE))
        demo.run(f"sample.py {given} --logdir {{own}}/{name}", own=own, prompts=PROMPTS, size=size)
    scored = "--shapes_dir {own}/shapes --report_dir {own}/report --aspect_ratios 1/1,2/1 --prompts_per_task {count}"
    flags = STAGE_C + REST + SEMANTIC + scored + scoring_precision()
    demo.run(f"evaluate.py {flags}", twofold=True, own=own, count=4 if demo.quick else 64)
    return own / "report" / "report.md"


CASCADE = Chapter("cascade", run, "a latent cascade: stages A, B, C and a semantic encoder", (15, 2))
