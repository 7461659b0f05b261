"""The demo's chapter on the shapes world with several objects: which color belongs to which shape, where, how many."""

from __future__ import annotations

from pathlib import Path

from .contract import Chapter, Demo
from .model import Network, Recipe, make_model

PROMPTS = (
    "a small red circle to the left of a large blue square|a green triangle above a purple cross|three yellow circles|"
    "two orange squares|a large red circle in the top left|a blue triangle on beige"
)
MERGES = 118  # of the captions' vocabulary: every word is a token
#: Scenes with several objects, and captions that say almost everything: these teach which word is about which object.
LONG: tuple[object, ...] = ("--pair_fraction", 0.7, "--count_fraction", 0.2, "--say_relation", 0.9, "--say_color", 0.9)
LONG += ("--say_size", 0.7, "--say_position", 0.8, "--say_background", 0.3)
#: The same with short captions, of which every word counts.
SHORT: tuple[object, ...] = ("--pair_fraction", 0.6, "--count_fraction", 0.25, "--say_relation", 0.35)
SHORT += ("--say_color", 0.5, "--say_size", 0.25, "--say_position", 0.6, "--say_background", 0.2)
FIRST_STEPS = 4000  # of the generator, on long captions
CARD = {
    "title": "shapes",
    "license": "mit",
    "example_prompt": PROMPTS.partition("|")[0],
    "description": "Draws colored shapes by captions: size, color, place, number, and how two of them lie. "
    "It tells 'a red circle and a blue square' from 'a blue circle and a red square'.",
    "limits": "It knows the words of the shapes world only: circle, square, triangle and cross, six colors, two sizes, "
    "five places, white and beige backgrounds, one to three objects. It reads captions, not sentences.",
}


def run(demo: Demo) -> Path:
    home, vocabulary = demo.home, demo.home / "shapes_vocabulary.txt"
    first, small, large = (home / f"shapes_{name}" for name in ("long", "32", "64"))
    for data, size, samples, mix in ((first, 32, 98304, LONG), (small, 32, 131072, SHORT), (large, 64, 16384, SHORT)):
        count = min(samples, 4096) if demo.quick else samples
        demo.run("prepare_data.py", "shapes", "--out_dir", data, "--image_size", size, "--train_samples", count, *mix)
    demo.run("prepare_data.py", "inspect", "--data_dir", small / "train", "--grid", home / "shapes_examples.png")
    demo.run("train_tokenizer.py", "--data_dir", first / "train", "--num_merges", MERGES, "--out", vocabulary)

    at_small, at_large = ((data / "train", data / "val") for data in (small, large))
    narrow = ("--classifier_enc_attn_dim", 64)
    few = ("--num_channels", 32, "--lr_anneal_steps", 650)
    networks = {
        "classifier": Network("train_classifier.py", "shapes_32_classifier", at_small, 20, 600, narrow),
        "upsampler": Network("train_generator.py", "shapes_64_upsampler", at_large, 40, 500, few, ("classifier",)),
        "generator": Network(
            "train_generator.py", "shapes_32_scenes", at_small, 40, first=(first / "train", FIRST_STEPS)
        ),
    }
    sampling = ("--sampler", "ancestral", "--timestep_respacing", 20, "--upsampler_timestep_respacing", 4)
    scoring: tuple[object, ...] = ("--shapes_dir", large, "--evaluators", "shapes,retrieval,upsampling")
    scoring += ("--prompts_per_task", 4 if demo.quick else 300, "--upsampler_batch_size", 32)
    return make_model(demo, Recipe("shapes", networks, vocabulary, PROMPTS, sampling, scoring, CARD))


SHAPES = Chapter("shapes", run, "the same of scenes with several objects", (120, 3))
