"""The bundled models: small enough, whole, and what their cards say."""

import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import diff_dalle
from diff_dalle.worlds.shapes.parser import parse_shapes
from diff_dalle.worlds.shapes.prompts import shape_prompts
from diff_dalle.worlds.shapes.shape_eval import judge

MODELS = diff_dalle.trained_models()
QUICK = {"steps": 15, "progress": False}
LIMIT = 25_000_000  # bytes of all models together


def test_they_are_small_enough_for_a_package():
    files = [path for model in MODELS.values() for path in Path(model.path).iterdir()]
    assert MODELS and sum(path.stat().st_size for path in files) < LIMIT


@pytest.mark.parametrize("name", MODELS)
def test_each_has_a_card_scores_and_logs(name):
    model, beside = MODELS[name], {path.name for path in Path(MODELS[name].path).iterdir()}
    assert model.card.startswith("---\nlicense:") and f'diff_dalle.load("{name}")' in model.card
    networks = {Path(file).stem for files in model.files.values() for file in files}
    assert {"scores.json", "report.md"} | {f"{network}_progress.csv" for network in networks} <= beside


def texts_of(path: Path) -> str:
    """What a file says in words: of weights their header, of a picture its metadata."""
    if path.suffix == ".png":
        with Image.open(path) as image:
            return str(image.info)
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        content = content[: 8 + int.from_bytes(content[:8], "little")]
    return content.decode("utf-8", errors="ignore")


@pytest.mark.parametrize("name", MODELS)
def test_each_says_nothing_of_the_machine(name):
    """No absolute path; those of URLs and of words such as "and/or" are none."""
    absolute = re.compile(r"(?<![\w.:/<>)*`~-])/\w[\w.-]*/[\w.-]")
    assert absolute.search('{"data_dir": "/somewhere/shards"}') and not absolute.search("https://a.b/c/d")
    for path in Path(MODELS[name].path).iterdir():
        assert not absolute.search(texts_of(path)), path


@pytest.fixture(scope="module")
def emoji():
    """Images by their prompts, the first two of the same noise."""
    prompts = ["red heart", "blue heart", "woman astronaut dark skin tone", "flag: Norway"]
    pipeline = diff_dalle.load("emoji/generator.safetensors")
    return dict(zip(prompts, pipeline.sample(prompts, seeds=[0, 0, 1, 2], **QUICK), strict=True))


def test_emoji_have_their_colors(emoji):
    """Of two prompts that differ in a word, and not on other pixels than those of the object."""
    red, blue = (emoji[f"{color} heart"].astype(float) for color in ("red", "blue"))
    assert red.shape == (64, 64, 3) and (red[0, 0] > 240).all() and (blue[0, 0] > 240).all()
    middle = np.s_[20:44, 20:44]
    assert red[middle][..., 0].mean() > red[middle][..., 2].mean() + 60
    assert blue[middle][..., 2].mean() > blue[middle][..., 0].mean() + 60


def test_the_classifier_knows_what_the_generator_draws(emoji):
    classifier = diff_dalle.load_classifier("emoji")
    similarity = classifier.encode_image(np.stack([*emoji.values()])) @ classifier.encode_text([*emoji]).T
    assert similarity.argmax(1).tolist() == [0, 1, 2, 3]


@pytest.mark.slow
def test_shapes_are_bound_to_their_colors_and_places():
    """Of pairs, and how many there are: most are right, of which chance would make one in ten."""
    prompts = shape_prompts(6, seed=1, tasks=("binding", "relation", "counting"))
    pipeline = diff_dalle.load("shapes/generator.safetensors")
    images = pipeline.sample([prompt.text for prompt in prompts], seed=1, batch_size=6, **QUICK)
    assert images.shape == (18, 32, 32, 3)
    right = [judge(*each)["correct"] for each in zip(prompts, parse_shapes(images), strict=True)]
    assert sum(right) >= 11
