"""The demo's chapter on the shapes world with several objects: which color belongs to which shape, where, how many."""

from __future__ import annotations

from pathlib import Path

from .contract import Chapter, Demo, Network, Recipe, make_model

PROMPTS = (
    "a small red circle to the left of a large blue square|a green triangle above a purple cross|three yellow circles|"
    "two orange squares|a large red circle in the top left|a blue triangle on beige"
)
MERGES = 118  # of the captions' vocabulary: every word is a token
#: Scenes with several objects, and captions that say almost everything: these teach which word is about which object.
LONG = (
    "--pair_fraction 0.7 --count_fraction 0.2 --say_relation 0.9 --say_color 0.9 --say_size 0.7 --say_position 0.8 "
    "--say_background 0.3"
)
#: The same with short captions, of which every word counts.
SHORT = (
    "--pair_fraction 0.6 --count_fraction 0.25 --say_relation 0.35 --say_color 0.5 --say_size 0.25 --say_position 0.6 "
    "--say_background 0.2"
)
FIRST_STEPS = 4000  # of the generator, on long captions
CARD = {
    "title": "shapes",
    "license": "mit",
    "example_prompt": PROMPTS.partition("|")[0],
    "description": "Draws colored shapes from captions naming size, color, position, number and relation. "
    "It tells 'a red circle and a blue square' from 'a blue circle and a red square'.",
    "limits": "It knows only the words of the shapes world: circle, square, triangle and cross, six colors, two sizes, "
    "five places, white and beige backgrounds, one to three objects. It reads captions, not sentences.",
}


def run(demo: Demo) -> Path:
    first, small, large = (demo.home / f"shapes_{name}" for name in ("long", "32", "64"))
    for data, size, samples, mix in ((first, 32, 98304, LONG), (small, 32, 131072, SHORT), (large, 64, 16384, SHORT)):
        count = min(samples, 4096) if demo.quick else samples
        render = f"prepare_data.py shapes --out_dir {{data}} --image_size {size} --train_samples {count} {mix}"
        demo.run(render, data=data)

    at_small, at_large = ((data / "train", data / "val") for data in (small, large))
    narrow = "train_classifier.py --preset shapes_32_classifier --classifier_enc_attn_dim 64"
    few = "train_generator.py --preset shapes_64_upsampler --num_channels 32 --lr_anneal_steps 650"
    scenes, begin = "train_generator.py --preset shapes_32_scenes", (first / "train", FIRST_STEPS)
    networks = {
        "classifier": Network(narrow, at_small, 20, 600),
        "upsampler": Network(few, at_large, 40, 500, ("classifier",)),
        "generator": Network(scenes, at_small, 40, first=begin),
    }
    sampling = "--sampler ancestral --steps 20 --upsampler_steps 4"
    counts = f"--prompts_per_task {4 if demo.quick else 300} --upsampler_batch_size 32"
    scoring = f"--shapes_dir {{home}}/shapes_64 --evaluators shapes,retrieval,upsampling {counts}"
    shown, captions = small / "train", first / "train"
    return make_model(demo, Recipe("shapes", networks, shown, captions, MERGES, PROMPTS, sampling, scoring, CARD))


SHAPES = Chapter("shapes", run, "the same of scenes with several objects", (120, 3))
