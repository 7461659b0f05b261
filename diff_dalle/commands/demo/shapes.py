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
# One object in .15 of the pictures, two in .65, several equal ones in .2, with captions that are often short.
MIX: tuple[object, ...] = ("--pair_fraction", 0.65, "--count_fraction", 0.2, "--say_relation", 0.65, "--say_color", 0.5)
MIX += ("--say_size", 0.35, "--say_position", 0.65, "--say_background", 0.2)
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
    small, large = home / "shapes_32", home / "shapes_64"
    count = 4096 if demo.quick else 131072
    for data, size, samples in ((small, 32, count), (large, 64, min(count, 16384))):
        sizes = ("--image_size", size, "--train_samples", samples)
        demo.run("prepare_data.py", "shapes", "--out_dir", data, *sizes, *MIX)
    demo.run("prepare_data.py", "inspect", "--data_dir", small / "train", "--grid", home / "shapes_examples.png")
    demo.run("train_tokenizer.py", "--data_dir", small / "train", "--num_merges", MERGES, "--out", vocabulary)

    at_small, at_large = ((data / "train", data / "val") for data in (small, large))
    narrow = ("--classifier_enc_attn_dim", 64)
    few = ("--num_channels", 32, "--lr_anneal_steps", 650)
    networks = {
        "classifier": Network("train_classifier.py", "shapes_32_classifier", at_small, 20, 600, narrow),
        "upsampler": Network("train_generator.py", "shapes_64_upsampler", at_large, 40, 500, few, ("classifier",)),
        "generator": Network("train_generator.py", "shapes_32_scenes", at_small, 40),
    }
    sampling = ("--sampler", "ancestral", "--timestep_respacing", 20, "--upsampler_timestep_respacing", 4)
    scoring: tuple[object, ...] = ("--shapes_dir", large, "--evaluators", "shapes,retrieval,upsampling")
    scoring += ("--prompts_per_task", 4 if demo.quick else 100, "--upsampler_batch_size", 32)
    return make_model(demo, Recipe("shapes", networks, vocabulary, PROMPTS, sampling, scoring, CARD))


SHAPES = Chapter("shapes", run, "the same of scenes with several objects", (120, 3))
