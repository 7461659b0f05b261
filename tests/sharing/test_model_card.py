"""Model cards: for every kind of checkpoint, with what files, runs and reports record and nothing else."""

import dataclasses
import json
import shlex

import pytest
import torch
import yaml
from cascade_making import make_stage
from checkpoint_making import TINY, make_classifier_file, make_file, make_run
from control_making import make_controlnet
from decoder_making import TEXT_UNET, UNET, make_decoder, save_decoder, save_unet
from latent_file_making import make_cascade
from others import Other
from refusing import refused
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.checkpoint import Identity, load_file, save_file
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.kinds import KINDS, find_kind
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.checkpoints.pixels import VitClipSettings
from diff_dalle.checkpoints.record import CheckpointSet, Record, save_record
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.commands.prepare import COMMANDS as PREPARE
from diff_dalle.commands.sample import SampleRun
from diff_dalle.config import to_dict
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluation.report import rendered
from diff_dalle.models.vit_clip import VitClipConfig
from diff_dalle.sharing.card import CardFile, CardTexts, model_card, score_tables
from diff_dalle.sharing.training_facts import training_hours
from diff_dalle.sharing.usage import model_usage
from diff_dalle.text.tokenizer import load_tokenizer

TEXTS = CardTexts("A model", "hf://me/it", "a red circle")


def card_of(path: str, texts: CardTexts = TEXTS, **options) -> str:
    role = find_kind(load_file(path)["kind"]).role
    return model_card([CardFile(role, "model.safetensors", path, "fp16")], texts, **options)


def rows(card: str, title: str) -> list[dict[str, str]]:
    """The rows of the first table under a heading, by column."""
    lines = card.partition(f"\n{title}\n")[2].partition("\n#")[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [dict(zip(table[0], row, strict=True)) for row in table[2:]]


def front_matter(card: str) -> dict:
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


# ------------------------------------------------------------------------------------------------------ every kind


def make_noisy_classifier(folder):
    """Of another project, the only ones that have it."""
    torch.save(Other(pooled=3).state, folder / "theirs.pt")
    out = str(folder / "noisy.pt")
    convert(ConvertConfig(str(folder / "theirs.pt"), out, image_size=16, num_head_channels=16, noise_schedule="linear"))
    return out


def make_vit_clip(folder):
    model = VitClipConfig(16, 8, 10, 8, 8, 1, 2, 8, 1, 2, 8, 50000)
    settings, path = VitClipSettings(model), str(folder / "vit.pt")
    identity = Identity("vit_clip", to_dict(settings), load_tokenizer().identity)
    save_file(path, "ema", identity, 0, 0, settings.build().state_dict())
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints by what they hold."""
    home = tmp_path_factory.mktemp("kinds")
    decoder = make_decoder(2)
    latent = make_cascade(home)
    base = make_file(home)
    return {
        "generator": base,
        "class-conditional": make_stage(home / "classes.pt", num_classes=3, enc_attn_dim=0, caption_dropout=0),
        "unconditional": make_stage(home / "plain.pt", enc_attn_dim=0, caption_dropout=0),
        "upsampler": make_stage(home / "upsampler.pt", image_size=16, small_size=8),
        "classifier": make_classifier_file(home),
        "noisy_classifier": make_noisy_classifier(home),
        "vit_clip": make_vit_clip(home),
        "clean CLIP": make_classifier_file((home / "clean", (home / "clean").mkdir())[0], noised=False),
        "decoder": save_decoder(home / "decoder.pt", decoder),
        "decoder's upsampler": save_unet(home / "unet1.pt", decoder, 1),
        "decoder of text": save_decoder(home / "text.pt", make_decoder(1, unets=(TEXT_UNET,))),
        "unconditional decoder": save_decoder(
            home / "none.pt",
            make_decoder(1, unets=(dataclasses.replace(UNET, cond_on_image_embeds=False),), unconditional=True),
        ),
        "stage_a": latent.a,
        "semantic": latent.semantic,
        "stage_b": latent.b,
        "stage_c": latent.c,
        "controlnet": make_controlnet(base, home / "canny.pt"),
        "stage_c_controlnet": make_controlnet(latent.c, home / "canny_c.pt"),
    }


WHAT = {
    "generator": ("text-to-image generator, 16×16 pixels", "text-to-image"),
    "upsampler": ("upsampler of images of 8×8 pixels, 16×16 pixels", "image-to-image"),
    "classifier": ("CLIP trained on noised images, 16×16 pixels", "zero-shot-image-classification"),
    "noisy_classifier": ("classifier of noisy images into classes, 16×16 pixels", "image-classification"),
    "vit_clip": ("CLIP with a vision transformer, 16×16 pixels", "zero-shot-image-classification"),
    "decoder": ("decoder of CLIP image embeddings, 8×8 and 16×16 pixels", "image-to-image"),
    "stage_a": ("stage A of a latent cascade, an autoencoder, 256×256 pixels", "image-to-image"),
    "semantic": ("semantic encoder of a latent cascade, with its previewer", "image-feature-extraction"),
    "stage_b": ("stage B of a latent cascade", "image-to-image"),
    "stage_c": ("stage C of a latent cascade", "text-to-image"),
    "controlnet": ("ControlNet of a generator, 16×16 pixels", "text-to-image"),
    "stage_c_controlnet": ("ControlNet of stage C", "text-to-image"),
}


@pytest.mark.parametrize("name", WHAT)
def test_every_kind_has_a_card(name, files):
    path = files[name]
    card = card_of(path)
    what, does = WHAT[name]
    assert f"* `model.safetensors`: {what}" in card and front_matter(card)["pipeline_tag"] == does
    state = load_file(path)["state"]
    if name not in ("stage_a", "semantic"):  # whose running statistics are in the file, but are no parameters
        listed = [int(row["parameters"].replace(",", "")) for row in rows(card, "## Compute")]
        assert sum(listed) == sum(value.numel() for value in state.values())
    assert str(path) not in card and "not recorded" in card


def test_all_kinds_are_here(files):
    assert {load_file(files[name])["kind"] for name in WHAT} == KINDS.keys()


def test_commands_parse_and_python_compiles(files):
    said = set()
    for path in files.values():
        content = load_file(path)
        settings = find_kind(content["kind"]).read(content["config"])
        command, code = model_usage(settings, content["trainee"], "hf://me/it", 'it\'s "a" dog')
        script, *flags = shlex.split(command)[1:]
        if script == "sample":
            parse(SampleRun, flags)
        else:
            parse(PREPARE[flags[0]].config, flags[1:])
        compile(code, "card", "exec")
        assert "hf://me/it" in command and "hf://me/it" in code
        assert "dog" not in command or ('it\'s "a" dog' in flags and json.dumps('it\'s "a" dog') in code)
        said.add(command)
    # Three kinds of decoders are used as generators of the same kind are, and a CLIP of either kind as another.
    assert len(said) == len(files) - 4


def test_a_cascade_in_one_model_needs_no_further_files(files):
    settings = find_kind("stage_c").read(load_file(files["stage_c"])["config"])
    command, code = model_usage(settings, "", "hf://me/it", "a", ("model_path", "stage_b", "stage_a"))
    assert command == "diff-dalle sample --model_path hf://me/it --prompts a"
    assert 'load("hf://me/it")' in code
    command, code = model_usage(settings, "", "hf://me/it", "a", ("model_path",))
    assert "--stage_b stage_b.pt --stage_a stage_a.pt" in command
    assert 'load("hf://me/it", stage_b="stage_b.pt", stage_a="stage_a.pt")' in code


# -------------------------------------------------------------------------------------------------- what is recorded


@pytest.fixture
def run_folder(tmp_path):
    """A run of 7 steps and 70 samples, whose data changed after step 3."""
    path = make_file(tmp_path)
    run = make_run()
    identity = run.recipe().open(ALONE).identity()
    data = [
        {
            "data_dir": {"digest": digit * 64, "totals": totals},
            "val_data_dir": {"digest": "f" * 64, "totals": "1 shard"},
        }
        for digit, totals in (("a", "2 shards with 30 samples"), ("b", "3 shards with 40 samples"))
    ]
    sets = [
        CheckpointSet(3, 30, {}, 10, data[0]),
        CheckpointSet(8, 80, {}, 10, data[1]),
        CheckpointSet(9, 90, {}, 20, {}),
    ]
    save_record(str(tmp_path), Record(identity, sets, {}, []))
    lines = [(2, 20, 0.01), (4, 40, 0.02), (8, 80, 0.04)]
    log = [{"step": step, "loss": 1.0, "samples": n, "samples_per_second": rate} for step, n, rate in lines]
    text = "".join(json.dumps(line) + "\n" for line in [*log[:2], {"step": 4, "held_out/loss": 1.0}, log[2]])
    (tmp_path / "progress.jsonl").write_text(text)
    return tmp_path, path


def test_what_the_run_folder_says(run_folder):
    _, path = run_folder
    card = card_of(path)
    (data,), (compute,) = rows(card, "## Data"), rows(card, "## Compute")
    assert data["training data"] == "2 shards with 30 samples, then 3 shards with 40 samples"
    assert data["held-out data"] == "1 shard" and data["initial weights"] == "random"
    assert compute["batch"] == "10" and (compute["steps"], compute["samples"]) == ("7", "70")
    seconds = 20 / 0.01 + 20 / 0.02 + 30 / 0.04
    assert float(compute["hours"]) == pytest.approx(seconds / 3600, rel=0.005)


def test_flops_are_those_of_a_pass_on_the_cpu(run_folder):
    network = open_network(run_folder[1], "generator").load(torch.device("cpu"))
    tokens = torch.zeros(1, TINY["text_length"], dtype=torch.int64)
    cond = Conditioning(tokens=tokens, mask=torch.ones(1, TINY["text_length"], dtype=torch.bool))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        network(torch.zeros(1, 3, 16, 16), torch.zeros(1, dtype=torch.int64), cond)
    flops = counter.get_total_flops()
    (row,) = rows(card_of(run_folder[1]), "## Compute")
    assert float(row["GFLOPs per image"]) == pytest.approx(flops / 1e9, rel=0.005)
    assert float(row["FLOPs of training"]) == pytest.approx(3 * flops * 70, rel=0.005)


def test_crops_count_as_they_are_trained_on(tmp_path):
    paths = [make_stage(tmp_path / f"{crop}.pt", image_size=32, small_size=16, crop_size=crop) for crop in (0, 16)]
    whole, crop = (rows(card_of(path), "## Compute")[0] for path in paths)
    assert float(crop["GFLOPs per image"]) < 0.4 * float(whole["GFLOPs per image"])
    assert "was trained on images of 32×32 pixels, in crops of 16×16." in card_of(paths[1])


def test_the_record_of_another_model_says_nothing(run_folder):
    folder, _ = run_folder
    other = make_file(folder, num_channels=32)
    (data,), (compute,) = (rows(card_of(other), title) for title in ("## Data", "## Compute"))
    assert set(data.values()) == {"model.safetensors", "not recorded"}
    assert compute["hours"] == compute["batch"] == "not recorded"


def test_hours_that_no_log_covers_are_not_recorded(run_folder):
    log = str(run_folder[0] / "progress.jsonl")
    assert training_hours(log, 81) is None and training_hours(log + "_none", 1) is None
    assert training_hours(log, 20) == pytest.approx(20 / 0.01 / 3600)
    with open(log, "a") as file:
        file.write('{"samples": 90, "samples_per_second": 0}\n')
    assert training_hours(log, 70) is not None  # it is over before
    with refused(r"progress\.jsonl is damaged in line 5"):
        training_hours(log, 90)


def test_an_assembled_decoder_has_no_total(files):
    """Its U-Nets were trained on different numbers of samples."""
    assert {row["FLOPs of training"] for row in rows(card_of(files["decoder"]), "## Compute")} == {"not recorded"}
    (one,) = rows(card_of(files["decoder's upsampler"]), "## Compute")
    assert float(one["FLOPs of training"]) > 0
    assert rows(card_of(files["controlnet"]), "## Compute")[0]["FLOPs of training"] == "not recorded"


def test_settings_are_those_of_the_file_without_places(tmp_path):
    """Data, logs and vocabularies lie on somebody's machine."""
    secret = "/home/somebody/secret"
    wandb = {"trackers": "wandb", "wandb_project": "secret_project"}
    run = make_run(data_dir=f"{secret}/shards", lr=0.0123, num_channels=24, perturbed_attention_scale=4, **wandb)
    session = run.recipe().open(ALONE)
    save_file(str(tmp_path / "ema.pt"), "ema", session.identity(), 7, 70, session.network().state_dict())
    card = card_of(str(tmp_path / "ema.pt"))
    assert "secret" not in card and str(tmp_path) not in card
    found = {(row["section"], row["setting"]): row["value"] for row in rows(card, "### model.safetensors")}
    assert found["model", "num_channels"] == "24" and found["optim", "lr"] == "0.0123"
    assert found["model", "channel_mult"] == "1.0,2.0" and found["diffusion", "noise_schedule"] == "linear"
    assert found["tokenizer", "identity"] == session.tokenizer.identity
    assert found["guidance", "perturbed_attention_scale"] == "4.0"  # of the previews, and so of all sampling
    assert not {section for section, _ in found} & {"data", "tracking", "distributed", "preview"}


def test_a_decoders_card_does_not_say_where_its_clip_was(tmp_path):
    clip = ClipConfig("diff_dalle", "/home/somebody/secret.pt", "diff_dalle:0123")
    card = card_of(save_unet(tmp_path / "unet.pt", make_decoder(1, clip=clip)))
    found = {row["setting"]: row["value"] for row in rows(card, "### model.safetensors")}
    assert "secret" not in card and found["clip.make"] == "diff_dalle" and found["unets[0].dim"] == "8"


def test_what_people_say(files):
    plain = card_of(files["generator"])
    assert "license" not in front_matter(plain) and "The license is not recorded." in plain
    texts = dataclasses.replace(TEXTS, license="mit", description="Of shapes.", limits="Shapes only.", prompt="a dog")
    card = card_of(files["generator"], texts=texts, samples=[("Samples", "grid.png")])
    assert front_matter(card)["license"] == "mit" and "## License\n\nmit" in card
    assert "\n\nOf shapes.\n\n" in card and "## Limits\n\nShapes only.\n" in card and "![Samples](grid.png)" in card
    assert "```bash\ndiff-dalle sample --model_path hf://me/it --prompts 'a dog'\n```" in card
    assert "reads the first 10 tokens of a text" in card  # of 12 with start and end


# ------------------------------------------------------------------------------------------------------------- scores


def test_score_tables():
    scores = {
        "step": 7,
        "scores": {
            "empty": 0.02,
            "a|b": {"name": "a|b", "n": 100, "score": 0.5, "low": 0.25, "high": 0.75, "chance": 0.125},
        },
        "retrieval": {"0": {"at_1": 0.5, "at_5": 1}, "100": {"at_1": 0.25}},
        "psnr": {"gain": {"value": 4.5, "low": 4.0, "high": 5.0}},
        "curve": [{"value": 1.0}],
        "texts": {"name": "x"},
    }
    assert rendered(score_tables(scores), 3).split("\n\n") == [
        "### scores",
        "| task | score | chance | n |\n| --- | --- | --- | --- |\n| a\\|b | 0.5 (0.25 – 0.75) | 0.125 | 100 |",
        "|  | value |\n| --- | --- |\n| empty | 0.02 |",
        "### retrieval",
        "|  | at_1 | at_5 |\n| --- | --- | --- |\n| 0 | 0.5 | 1 |\n| 100 | 0.25 |  |",
        "### psnr",
        "|  | value |\n| --- | --- |\n| gain | 4.5 (4 – 5) |",
    ]
