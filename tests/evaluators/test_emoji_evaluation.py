"""The evaluator of the emoji world."""

import json

import numpy as np
import pytest
from cascade_making import make_stage
from checkpoint_making import make_classifier_file
from emoji_making import people, use_painter
from PIL import Image

from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluators.context import Context
from diff_dalle.evaluators.emoji import Share, name_share, read_tones, skin_palette, tone_share
from diff_dalle.randomness import permutation
from diff_dalle.sampling.classifier import Classifier
from diff_dalle.worlds.emoji.font import square_of
from diff_dalle.worlds.emoji.names import TONES, Emoji
from diff_dalle.worlds.emoji.world import EmojiConfig, EmojiWorld, read_emoji

NOISE = {"text_length": 24, "diffusion_steps": 8, "noise_schedule": "cosine"}


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """A world of 20 pixels, and models of 16."""
    use_painter(monkeypatch, people(20))
    EmojiWorld(EmojiConfig(image_size=20, held_out=0.1, held_out_combinations=0.1)).write(str(tmp_path / "world"))
    make_stage(tmp_path / "base.pt", image_size=16, sample_interval=0, **NOISE)
    make_classifier_file(tmp_path, **NOISE)  # best.pt
    values = {"model_path": "base.pt", "classifier_path": "best.pt", "emoji_dir": "world", "report_dir": "report"}
    return ["--steps", "2", *(part for k, v in values.items() for part in (f"--{k}", str(tmp_path / v)))]


def test_what_is_held_out_is_scored(flags, tmp_path, monkeypatch):
    """With the true pictures in place of samples, all skin tones are right and names as good as theirs."""
    folder = str(tmp_path / "world")
    splits = {split: read_emoji(folder, split) for split in ("names", "combinations")}

    def true(self, prompts, guidance, all_stages=False):
        (pictures,) = (seen for emoji, seen in splits.values() if [each.name for each in emoji] == list(prompts))
        return [np.stack([np.asarray(square_of(Image.fromarray(picture), 16)) for picture in pictures])]

    run = parse(EvaluateRun, [*flags, "--evaluators", "emoji"])
    sampled = Evaluation(run, ALONE)
    assert "| combinations |" in sampled.run()
    sampled.write()
    report = tmp_path / "report"
    scores = json.loads((report / "scores.json").read_text())["emoji"]
    assert scores.keys() == splits.keys()
    assert (report / "emoji_names.png").exists() and "emoji_combinations.png" in (report / "report.md").read_text()
    for split, (emoji, _) in splits.items():
        assert scores[split]["tone"]["n"] == scores[split]["name"]["n"] == len(emoji)
        name = scores[split]["name"]
        assert name["low"] < name["score"] == name["right"] / name["n"] < name["high"]
        assert scores[split]["distance"] > scores[split]["true_distance"] > 0

    monkeypatch.setattr(Context, "sample", true)
    ideal = Evaluation(run, ALONE)
    ideal.run()
    for split, found in ideal.report.scores["emoji"].items():
        assert found["tone"]["right"] == found["tone"]["n"] == len(splits[split][0])
        assert found["name"] == found["true_name"] == scores[split]["true_name"]
        assert found["distance"] == found["true_distance"] == scores[split]["true_distance"]


def test_names_are_found_by_a_judge_of_another_size(flags, tmp_path, monkeypatch):
    """It sees samples and true pictures at its own size, and no classifier is needed."""
    (tmp_path / "other").mkdir()
    judge = make_classifier_file(tmp_path / "other", image_size=32, classifier_attention_resolutions="16", **NOISE)
    encode, seen = Classifier.encode_image, []

    def encoded(self, images):
        seen.append((self.image_size, images.shape[1:]))
        return encode(self, images)

    monkeypatch.setattr(Classifier, "encode_image", encoded)
    without = [flag for flag in flags if "best.pt" not in flag and flag != "--classifier_path"]
    for given, size in ((flags, 16), ([*without, "--judge_path", str(judge)], 32)):
        seen.clear()
        evaluation = Evaluation(parse(EvaluateRun, [*given, "--evaluators", "emoji"]), ALONE)
        evaluation.run()
        assert seen == [(size, (size, size, 3))] * 4
        assert evaluation.report.scores["emoji"].keys() == {"names", "combinations"}


def test_other_evaluators_take_the_held_out_names(flags):
    run = parse(EvaluateRun, [*flags, "--evaluators", "captions,retrieval"])
    evaluation = Evaluation(run, ALONE)
    evaluation.run()
    assert evaluation.report.scores["real images"]["n"] == len(read_emoji(run.evaluation.emoji_dir, "names")[0])


def test_the_world_needs_a_classifier_and_no_other_captions(tmp_path):
    with pytest.raises(InputError, match="--emoji_dir needs --classifier_path or --judge_path"):
        parse(EvaluateRun, ["--model_path", "base.pt", "--emoji_dir", str(tmp_path)])
    with pytest.raises(InputError, match="set either --shapes_dir or --data_dir, or --emoji_dir"):
        parse(EvaluateRun, ["--model_path", "base.pt", "--emoji_dir", str(tmp_path), "--shapes_dir", str(tmp_path)])


# ------------------------------------------------------------------------------------------------------------- scores


def painted(tones: list[str]) -> np.ndarray:
    """Skin in 4 of 64 pixels, on a ground of one color for all."""
    pictures = np.full((len(tones), 8, 8, 3), (40, 90, 200), dtype=np.uint8)
    for picture, tone in zip(pictures, tones, strict=True):
        picture[2:4, 2:4] = 200 - 35 * TONES.index(tone)
    return pictures


def test_skin_tones_are_read_by_the_palette_of_the_training_pictures():
    tones = [tone for tone in TONES for _ in range(3)]
    palette = skin_palette(painted(tones), tones)
    np.testing.assert_allclose(palette, [[200 - 35 * i] * 3 for i in range(5)])
    assert read_tones(painted(tones), palette).tolist() == [TONES.index(tone) for tone in tones]
    assert read_tones(np.full((1, 8, 8, 3), (40, 90, 200), np.uint8), palette).tolist() == [-1]


def test_tones_are_judged_where_the_true_picture_shows_them():
    palette = skin_palette(painted(list(TONES)), list(TONES))
    emoji = [
        Emoji(str(i), str(i), "", str(i), tones) for i, tones in enumerate([("dark",), ("light",), ("medium",), ()])
    ]
    true = painted(["dark", "light", "dark", "dark"])  # of the third, something else
    assert tone_share(emoji, painted(["dark", "dark", "medium", "dark"]), true, palette) == Share(1, 2)


def test_a_name_is_found_among_as_many_others():
    """By similarity; features that are all alike find none."""
    features = np.eye(8, dtype=np.float32)
    assert name_share(features, features, 8) == Share(8, 8)
    assert name_share(np.roll(features, 1, 0), features, 8) == Share(0, 8)
    assert name_share(np.ones_like(features), features, 2) == Share(0, 8)
    wrong = features.copy()
    wrong[0], wrong[1] = features[0] + 2 * features[5], features[1] + 2 * features[5]
    right = [name_share(wrong, features, count).right for count in range(2, 9)]
    places = [[n for n in permutation(i, "emoji candidates", 8) if n != i].index(5) for i in (0, 1)]
    assert right == [8 - sum(place < count - 1 for place in places) for count in range(2, 9)] and right[0] > right[-1]
