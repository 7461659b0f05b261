"""The demo's chapter on decoders: a CLIP, its embeddings, and two U-Nets that turn them into pictures again."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import RENDER, Chapter, Demo, draw_pictures

PROMPTS = "a large red circle in the top left|a small green cross in the center|a large blue square in the bottom right"
PICTURES = 6  # held-out ones to vary
GUIDANCE = "--guidance_scale 2"
CLIP_ITERATIONS = (400, 40)  # and of the quick demo
SAMPLES = ((40_000, 1_600), (6_400, 640))  # that each U-Net is trained on, and of the quick demo
SPLITS = "--data_dir {shapes}/train --val_data_dir {shapes}/val"
EMBED = "prepare_data.py embeddings --data_dir {shapes}/train --clip_path {own}/clip.pt --out_dir {own}/embeddings"
UNET = (
    "train_decoder.py --preset decoder_tiny --set data.webdataset_base_url={shapes}/train/shapes-train-{{}}.tar "
    "--set data.shard_width=5 --set data.img_embeddings_url={own}/embeddings --set train.unet_training_mask={mask} "
    "--set train.epoch_samples={samples} --set tracker.data_path={own}/unet{i} "
    "--set tracker.save.0.save_latest_to={own}/unet{i}.pt"
)


def run(demo: Demo) -> Path:
    own, count = demo.home / "decoder", len(SAMPLES)
    demo.run(RENDER)
    clip = f"--preset shapes_32_classifier --noised False {SPLITS} --iterations {CLIP_ITERATIONS[demo.quick]}"
    demo.run(f"train_classifier.py {clip} --logdir {{own}}/clip", own=own)
    shutil.copy(own / "clip" / "best.pt", own / "clip.pt")
    demo.run(EMBED, own=own)
    for i in range(count):
        mask = ",".join(str(i == k) for k in range(count))
        demo.run(UNET, own=own, i=i, mask=mask, samples=SAMPLES[i][demo.quick])

    decoder = own / "decoder.pt"
    decoder.unlink(missing_ok=True)
    unets = ",".join(str(own / f"unet{i}.pt") for i in range(count))
    demo.run("assemble_decoder.py --model_paths {unets} --out {decoder}", unets=unets, decoder=decoder)
    demo.run("info.py --model_path {decoder}", decoder=decoder)
    pictures = own / "pictures"
    draw_pictures(pictures, demo.shapes, PICTURES)
    requests = {
        "variations": f"--images {{pictures}} --num_samples {3 * PICTURES}",
        "interpolation": f"--images {{pictures}}/0.png,{{pictures}}/{PICTURES - 1}.png --interpolate 8",
        "prompts": "--prompts {prompts}",
    }
    for name, given in requests.items():
        sampled = f"--model_path {{own}}/decoder.pt {given} {GUIDANCE} --logdir {{own}}/{name}"
        demo.run(f"sample.py {sampled}", own=own, pictures=pictures, prompts=PROMPTS)
    counts = f"--prompts_per_task {8 if demo.quick else 100} {GUIDANCE}"
    scored = f"--decoder_path {{own}}/decoder.pt --shapes_dir {{shapes}} --report_dir {{own}}/report {counts}"
    demo.run(f"evaluate.py {scored}", own=own)
    return own / "report" / "report.md"


DECODER = Chapter("decoder", run, "a CLIP and a decoder of two U-Nets, from its embeddings to pictures", (12, 3))
