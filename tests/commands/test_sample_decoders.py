"""sample.py with decoders: pictures, prompts and their grids, from files on the command line."""

import shlex
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_making import make_classifier_file, make_file, samples_in
from decoder_making import UNET, make_decoder, save_decoder, save_unet
from PIL import Image
from script_running import run

import diff_dalle
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sample_inputs import read_embeddings, read_request, read_samples
from diff_dalle.commands.sample_outputs import beside, write_results
from diff_dalle.config import InputError
from diff_dalle.embeddings.clip import load_clip
from diff_dalle.sampling.image_prompts import ImagePrompts
from diff_dalle.sampling.request import Request

COLORS = {"a": (255, 0, 0), "b": (0, 0, 255), "c": (255, 255, 255)}


@pytest.fixture
def pictures(tmp_path):
    """A folder of pictures of one color each."""
    (tmp_path / "pictures").mkdir()
    for name, color in COLORS.items():
        Image.new("RGB", (20, 24), color).save(tmp_path / "pictures" / f"{name}.png")
    return tmp_path / "pictures"


def request(flags):
    run = parse(SampleRun, shlex.split(f"--model_path decoder.pt {flags}"))
    return read_request(run.what, run.edit)


# --------------------------------------------------------------------------------------------------------------- inputs


def test_pictures_are_files_and_folders(pictures, tmp_path):
    """In order, each used in turn; none is read before it is needed."""
    found = request(f"--images {pictures}")
    assert len(found) == 3 and found.images.names == ["a.png", "b.png", "c.png"] and found.seeds == [0, 1, 2]
    assert [tuple(image[0, 0]) for image in found.images.images] == list(COLORS.values())
    one = request(f"--images {pictures}/c.png,{pictures} --num_samples 5 --seed 3")
    assert one.images.names == ["c.png", "a.png", "b.png", "c.png"] and one.seeds == [3, 4, 5, 6, 7]
    assert len(request(f"--images {pictures} --prompts 'x|y|z|w'")) == 4
    missing = request(f"--images {tmp_path}/missing.png")
    with pytest.raises(InputError, match="missing.png does not exist"):
        missing.images.images[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="--images .*empty holds no images"):
        request(f"--images {tmp_path}/empty")
    with pytest.raises(InputError, match="--images .*nowhere"):
        request(f"--images {tmp_path}/nowhere")


def test_mixtures_and_interpolations_are_requested(pictures):
    two = f"{pictures}/a.png,{pictures}/b.png"
    mixture = request(f"--images {two} --image_weights 0.7,-0.3")
    assert len(mixture) == 1 and mixture.images.weights == (0.7, -0.3)
    strips = request(f"--images {two} --interpolate 4 --num_samples 8 --seed 2")
    assert len(strips) == 8 and strips.seeds == [2] * 4 + [3] * 4 and strips.images.interpolate == 4
    assert len(request(f"--images {two} --interpolate 4")) == 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--image_weights 1,2", "image_weights is set, but there are no images: give them with --images"),
        ("--interpolate 4", "interpolate is set, but there are no images"),
        ("--images a.png,b.png --interpolate 4 --image_weights 1,2", "exclude each other"),
        (
            "--images a.png,b.png --interpolate 4 --num_samples 6",
            "6, but must be a multiple of --interpolate",
        ),
        ("--clip_path clip.pt", "--clip_path is set, but there is nothing to encode: give --images or --prompts"),
        ("--embeddings e.npy --clip_path clip.pt", "--clip_path is set, but there is nothing to encode"),
        ("--images a.png --clip_path c --clip_make other", "must be one of diff_dalle, open_clip, openai"),
    ],
)
def test_impossible_flags_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        request(flags)


def test_a_file_of_embeddings_is_whole(tmp_path):
    path = tmp_path / "embeddings.npy"
    np.save(path, np.ones((2, 3), np.float32))
    assert read_embeddings(str(path)).tolist() == [[1.0] * 3] * 2
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(InputError, match=r"is a \.npy file of 20 bytes, not 24, but embeddings must be"):
        read_embeddings(str(path))
    np.save(path, np.arange(6, dtype=np.float32).reshape(3, 2).T)  # in Fortran's order
    assert read_embeddings(str(path)).tolist() == [[0, 2, 4], [1, 3, 5]]
    np.savez(tmp_path / "words.npz", np.array(["one"]))
    with pytest.raises(InputError, match=r"words.npz cannot be read \(arr_0 is a \.npy file of <U3 \[1\]\): it must"):
        read_samples(str(tmp_path / "words.npz"))


# -------------------------------------------------------------------------------------------------------------- outputs


def made_from(pictures, count, **settings):
    """A request of ``count`` images from pictures of one color, and gray samples whose level is their number."""
    files = [np.full((9, 7, 3), COLORS[name], dtype=np.uint8) for name in pictures]
    given = ImagePrompts(files, names=list(pictures), **settings)
    samples = np.arange(count, dtype=np.uint8).repeat(4 * 4 * 3).reshape(count, 4, 4, 3)
    return Request([""] * count, range(count), images=given), samples


def shown_beside(request, samples):
    """Cells as letters (pictures) and numbers (samples), labels, columns."""
    names = {color: name for name, color in COLORS.items()}
    cells, labels, columns = beside(request.images, samples)
    assert cells.shape[1:] == (4, 4, 3)
    colors = [tuple(int(value) for value in image[2, 2]) for image in cells]
    return [names.get(color, color[0]) for color in colors], labels, columns


def test_given_pictures_are_shown_beside_the_samples(tmp_path):
    request, samples = made_from("ab", 5)
    said = write_results(str(tmp_path), request, {"one": samples})
    assert said.startswith(
        "5 images, variations.png (beside the given ones), grid.jpg, captions.txt and samples_5x4x4x3.npz are in"
    )
    white = "c"  # fills the shorter row
    assert shown_beside(request, samples) == (
        ["a", 0, 2, 4, "b", 1, 3, white],
        ["a", "", "", "", "b", "", "", ""],
        4,
    )
    lines = (tmp_path / "captions.txt").read_text().splitlines()
    assert lines[:2] == ["000000\t0\ta", "000001\t1\tb"] and (tmp_path / "000004.png").exists()
    assert (tmp_path / "variations.png").exists()
    for count, settings, cells, width in (
        (3, {"weights": (1, 2)}, ["a", "b", 0, 1, 2], 5),
        (6, {"interpolate": 3}, ["a", 0, 1, 2, "b", "a", 3, 4, 5, "b"], 5),
    ):
        assert shown_beside(*made_from("ab", count, **settings))[::2] == (cells, width)


def test_only_as_many_are_shown_as_can_be_looked_at():
    for settings, count, pictures, columns in (({}, 200, "ab", 33), ({"interpolate": 10}, 100, "ab", 12)):
        cells, _, width = shown_beside(*made_from(pictures, count, **settings))
        assert width == columns and len(cells) <= 80 and cells[-1] == ("b" if settings else 63)
    assert shown_beside(*made_from("ab", 70, interpolate=70))[0] == [
        "a",
        *range(70),
        "b",
    ]  # a strip is shown to its end


def test_captions_have_the_prompts_too(tmp_path):
    request, samples = made_from("ab", 2)
    write_results(str(tmp_path), replace(request, prompts=["a red circle", ""]), {"one": samples})
    lines = (tmp_path / "captions.txt").read_text().splitlines()
    assert [line.split("\t")[2] for line in lines] == ["a red circle | a", "b"]


def test_a_sweep_and_requests_without_pictures_write_what_they_did(tmp_path):
    request, samples = made_from("ab", 2)
    said = write_results(str(tmp_path / "sweep"), request, {"x": samples, "y": samples})
    assert (
        said.startswith("2 images for each of 2 scales") and (tmp_path / "sweep" / "x" / "samples_2x4x4x3.npz").exists()
    )
    said = write_results(str(tmp_path / "plain"), replace(request, images=None), {"one": samples})
    assert said.startswith("2 images, grid.jpg, captions.txt") and not (tmp_path / "plain" / "variations.png").exists()


# ----------------------------------------------------------------------------------------------------------- the script


def test_the_script_makes_variations_on_any_number_of_processes(pictures, tmp_path, monkeypatch):
    """From a list of files with a U-Net each, by a CLIP that they do not name, and from all in one."""
    monkeypatch.chdir(tmp_path)
    clip_path = make_classifier_file(tmp_path, noised=False)
    clip = load_clip("diff_dalle", clip_path, "cpu")
    unet = replace(UNET, image_embed_dim=clip.embed_dim)
    decoder = make_decoder(2, unet, clip=ClipConfig("diff_dalle", clip_path, clip.identity), sample_timesteps=(3,))
    unknown = replace(decoder, clip=ClipConfig("openai", "ViT-L/14"))
    paths = [save_unet(tmp_path / f"unet{i}.pt", unknown, i) for i in range(2)]
    flags = f"--images {pictures} --num_samples 4 --seed 5 --device cpu --precision fp32"
    given = f"--clip_path {clip_path} --clip_make diff_dalle --logdir {tmp_path}/one"
    said = run("sample.py", flags, given, "--model_path", ",".join(paths)).stdout
    assert "4 images, variations.png" in said
    whole = save_decoder(tmp_path / "decoder.pt", decoder)
    run("sample.py", flags, f"--model_path {whole} --batch_size 1 --logdir {tmp_path}/two", ranks=2)
    one, two = (samples_in(tmp_path / name) for name in ("one", "two"))
    assert one.shape == (4, 16, 16, 3) and np.abs(one.astype(int) - two).max() <= 1
    images = [np.asarray(Image.open(pictures / f"{name}.png")) for name in "abca"]
    found = diff_dalle.load(whole, "cpu").sample(images=images, seed=5, progress=False)
    assert np.abs(one.astype(int) - found).max() <= 1
    assert (tmp_path / "one" / "variations.png").exists()
    flags = f"--model_path {make_file(tmp_path)} --images {pictures} --device cpu"
    refused = run("sample.py", flags, ok=False)
    assert refused.returncode == 2 and "no stage is conditioned on image embeddings" in refused.stderr
    assert not (tmp_path / "samples").exists()
