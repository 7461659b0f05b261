"""Distances of a decoder's samples from the pictures whose embeddings they are made from, and what is no decoder."""

import json
import re

import pytest
from checkpoint_making import make_classifier_file, make_file
from decoder_making import UNET, make_decoder, save_decoder
from eval_making import QUARTERS
from shard_making import encoded, random_image, tar_bytes

from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.evaluate import EvaluateRun, Evaluation
from diff_dalle.config import InputError, as_flag
from diff_dalle.distributed.world import ALONE
from diff_dalle.embeddings.clip import load_clip

N = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder of two U-Nets and its CLIP, a generator, and shards."""
    folder = tmp_path_factory.mktemp("decoders")
    path = make_classifier_file(folder, noised=False)
    clip = ClipConfig("diff_dalle", path, load_clip("diff_dalle", path, "cpu").identity)
    unet = {**vars(UNET), "image_embed_dim": 16}
    decoder = make_decoder(2, type(UNET)(**unet), clip=clip, sample_timesteps=(2,))
    save_decoder(folder / "decoder.pt", decoder)
    (folder / "generator").mkdir()
    make_file(folder / "generator")
    files = [(f"{i:03d}.png", encoded(random_image(16, 16, i), "PNG")) for i in range(N)]
    files += [(f"{i:03d}.txt", b"a picture") for i in range(N)]
    (folder / "shards").mkdir()
    (folder / "shards" / "0.tar").write_bytes(tar_bytes(sorted(files)))
    return folder


def evaluation(folder, **flags):
    usual = {"data_dir": folder / "shards", "metrics": "fid,kid", "feature_network": QUARTERS, "device": "cpu"}
    usual |= {"report_dir": folder / "report", **flags}
    words = [str(part) for name, value in usual.items() if value != "" for part in (f"--{name}", value)]
    return Evaluation(parse(EvaluateRun, words), ALONE)


def test_samples_are_compared_with_the_pictures_of_their_embeddings(folder, monkeypatch):
    run = evaluation(folder, decoder_path=folder / "decoder.pt")
    given, sampled = [], run.context.pipeline.sample_stages
    monkeypatch.setattr(
        run.context.pipeline,
        "sample_stages",
        lambda request, *a, **o: given.append(request) or sampled(request, *a, **o),
    )
    run.run()
    run.write()
    scores = json.loads((folder / "report" / "scores.json").read_text())["feature_metrics"]
    assert scores["n"] == N and scores["generated"]["frechet_distance"] > 0
    assert given[0].embeddings.shape == (N, 16) and "same embeddings" in (folder / "report" / "report.md").read_text()
    assert run.context.pipeline.image_size == 16  # of the last U-Net


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model_path": "decoder.pt"}, "--model_path is .*, which holds a decoder: give it with --decoder_path"),
        (
            {"decoder_path": "generator/ema.pt"},
            "--decoder_path is .*, which holds a generator: give it with --model_path",
        ),
        (
            {"decoder_path": "decoder.pt", "feature_network": ""},
            "set --shapes_dir, or --data_dir, --metrics and --feature_n",
        ),
        ({"decoder_path": "decoder.pt", "metrics": ""}, "the report would be empty: set --metrics"),
        ({"decoder_path": "decoder.pt", "classifier_path": "best.pt"}, "--classifier_path is given, .*: leave it out"),
        ({"decoder_path": "decoder.pt", "metrics": "", "evaluators": "guidance"}, "guidance needs a base generator"),
    ],
)
def test_what_does_not_suit_is_one_sentence(folder, flags, words):
    paths = ("model_path", "decoder_path", "classifier_path")
    given = {name: folder / value if name in paths else value for name, value in flags.items()}
    with pytest.raises(InputError) as error:
        evaluation(folder, **given).run()
    assert re.search(words, error.value.message(as_flag)), error.value.message(as_flag)
