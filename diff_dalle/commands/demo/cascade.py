"""The demo's chapter on the latent cascade: its four networks, samples and scores at several aspect ratios."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import Chapter, Demo, Job, scoring_precision

PROMPTS = "a large red circle in the top left|a small blue square to the right of a yellow triangle|two green crosses"
# Width to height of the pictures: those of the buckets, which cut none of their objects. Squares are learned sooner.
RATIOS = "1/1,11/5,11/5,5/11,5/11"
WIDE = (40, 88)  # height and width of the bucket for 2:1
PICTURES = 6  # held-out ones to reconstruct
UPDATES = {"stage_a": 80, "semantic": 80, "stage_b": 60, "stage_c": 60}  # of the quick demo


def run(demo: Demo) -> Path:
    from PIL import Image

    from ...shapes.render import render
    from ...shapes.scenes import scene
    from ...shapes.shards import read_shapes_config

    home, world = demo.home / "cascade", demo.home / "cascade" / "shapes"
    demo.run("prepare_data.py", "shapes", "--out_dir", world, "--image_size", 64, "--aspect_ratios", RATIOS)
    data = {"webdataset_path": world / "train", "data.val_path": world / "val"}
    files = {kind: home / f"{kind}.pt" for kind in UPDATES}

    def training(kind: str, weights: str, *after: str, **frozen: Path) -> Job:
        settings: dict[str, object] = {
            "checkpoint_path": home / "runs",
            "output_path": home / "previews",
            **data,
            **frozen,
        }
        settings |= {"updates": UPDATES[kind]} if demo.quick else {}
        flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        last = home / "runs" / f"{kind}_tiny"
        return Job(
            "train_cascade.py",
            ["--preset", f"cascade_{kind}_tiny", *flags],
            after,
            lambda: shutil.copy(max(last.glob(f"{weights}*.pt")), files[kind]),
        )

    effnet = {"effnet_checkpoint_path": files["semantic"]}
    stage_a = {"stage_a_checkpoint_path": files["stage_a"]}
    demo.run_jobs(
        {
            "semantic": training("semantic", "model"),
            "stage_a": training("stage_a", "model", "semantic"),  # only then: A and B together take less time than C
            "stage_b": training("stage_b", "ema", "stage_a", **effnet, **stage_a),
            "stage_c": training("stage_c", "ema", "semantic", **effnet),
        }
    )

    pictures, report = home / "pictures", home / "report"
    pictures.mkdir(exist_ok=True)
    config = read_shapes_config(str(world))
    for i in range(PICTURES):
        Image.fromarray(render(scene(config, i, "val"), WIDE)).save(pictures / f"{i}.png")
    rest = ["--stage_b", files["stage_b"], "--stage_a", files["stage_a"]]
    c, semantic = ["--model_path", files["stage_c"], *rest], ["--semantic", files["semantic"]]
    size = ["--sample_size", ",".join(map(str, WIDE))]
    requests: dict[str, list[object]] = {
        "squares": [*c, "--prompts", PROMPTS],
        "wide": [*c, "--prompts", PROMPTS, *size],
        "previews": ["--model_path", files["stage_c"], *semantic, "--prompts", PROMPTS],
        "edited": [*c, *semantic, "--init_image", pictures / "0.png", "--strength", 0.6, "--prompts", PROMPTS, *size],
        "reconstructions": [*rest, *semantic, "--reconstruct", pictures, *size],
    }
    for name, given in requests.items():
        demo.run("sample.py", *given, "--logdir", home / name)
    demo.run(
        "evaluate.py", *c, *semantic, "--shapes_dir", world, "--report_dir", report, "--aspect_ratios", "1/1,2/1",
        "--prompts_per_task", 4 if demo.quick else 64, *scoring_precision(), twofold=True,
    )  # fmt: skip
    return report / "report.md"


CASCADE = Chapter("cascade", run, "a latent cascade: stages A, B, C and a semantic encoder", (15, 2))
