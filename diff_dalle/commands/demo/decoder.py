"""The demo's chapter on decoders: a CLIP, its embeddings, and two U-Nets that turn them into pictures again."""

from __future__ import annotations

import shutil
from pathlib import Path

from .contract import Chapter, Demo

PROMPTS = "a large red circle in the top left|a small green cross in the center|a large blue square in the bottom right"
PICTURES = 6  # held-out ones to vary
GUIDANCE = ("--guidance_scale", 2)
CLIP_ITERATIONS = (400, 40)  # and of the quick demo
SAMPLES = ((40_000, 1_600), (6_400, 640))  # that each U-Net is trained on, and of the quick demo


def run(demo: Demo) -> Path:
    from PIL import Image

    from ...shapes.render import render
    from ...shapes.scenes import scene
    from ...shapes.shards import read_shapes_config

    home, data = demo.home / "decoder", demo.shapes
    clip, embeddings, pictures = home / "clip.pt", home / "embeddings", home / "pictures"
    demo.render_shapes()
    splits = ["--data_dir", data / "train", "--val_data_dir", data / "val"]
    length = ["--iterations", CLIP_ITERATIONS[demo.quick]]
    demo.run(
        "train_classifier.py", "--preset", "shapes_32_classifier", "--noised", False, *splits, *length,
        "--logdir", home / "clip",
    )  # fmt: skip
    shutil.copy(home / "clip" / "best.pt", clip)
    demo.run(
        "prepare_data.py", "embeddings", "--data_dir", data / "train", "--clip_path", clip, "--out_dir", embeddings
    )

    unets = [home / f"unet{i}.pt" for i in range(len(SAMPLES))]
    for i, path in enumerate(unets):
        settings = {
            "data.webdataset_base_url": data / "train" / "shapes-train-{}.tar",
            "data.shard_width": 5,
            "data.img_embeddings_url": embeddings,
            "train.unet_training_mask": ",".join(str(i == k) for k in range(len(SAMPLES))),
            "train.epoch_samples": SAMPLES[i][demo.quick],
            "tracker.data_path": home / f"unet{i}",
            "tracker.save.0.save_latest_to": path,
        }
        flags = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        demo.run("train_decoder.py", "--preset", "decoder_tiny", *flags)

    decoder, report = home / "decoder.pt", home / "report"
    decoder.unlink(missing_ok=True)
    demo.run("assemble_decoder.py", "--model_paths", ",".join(map(str, unets)), "--out", decoder)
    demo.run("info.py", "--model_path", decoder)
    config = read_shapes_config(str(data))
    pictures.mkdir(exist_ok=True)
    for i in range(PICTURES):
        Image.fromarray(render(scene(config, i, "val"), config.image_size)).save(pictures / f"{i}.png")
    ends = f"{pictures / '0.png'},{pictures / f'{PICTURES - 1}.png'}"
    requests: dict[str, list[object]] = {
        "variations": ["--images", pictures, "--num_samples", 3 * PICTURES],
        "interpolation": ["--images", ends, "--interpolate", 8],
        "prompts": ["--prompts", PROMPTS],
    }
    for name, given in requests.items():
        demo.run("sample.py", "--model_path", decoder, *given, *GUIDANCE, "--logdir", home / name)
    demo.run(
        "evaluate.py", "--decoder_path", decoder, "--shapes_dir", data, "--report_dir", report,
        "--prompts_per_task", 8 if demo.quick else 100, *GUIDANCE,
    )  # fmt: skip
    return report / "report.md"


DECODER = Chapter("decoder", run, "a CLIP and a decoder of two U-Nets, from its embeddings to pictures", (12, 3))
