"""Costs of networks and presets, descriptions of files, and that the presets of a cascade belong together."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch
from checkpoint_making import TINY, TINY_CLASSIFIER, make_run
from decoder_making import TEXT_UNET, UNET, make_decoder, make_network, save_decoder, save_unet
from script_running import run as run_script
from torch import nn
from torch.nn import functional as F

from diff_dalle.batch import Conditioning
from diff_dalle.checkpoints.cascade import TrainedWith
from diff_dalle.checkpoints.checkpoint import save_file
from diff_dalle.checkpoints.decoder import ClipConfig
from diff_dalle.checkpoints.kinds import find_kind
from diff_dalle.commands.info import (
    ENDINGS,
    FULL_SIZE,
    cost_parts,
    describe,
    describe_file,
    parse_info,
    preset_networks,
    preset_rows,
    whole_presets,
)
from diff_dalle.commands.sources import preset_names
from diff_dalle.config import InputError
from diff_dalle.distributed.world import ALONE
from diff_dalle.evaluation.report import rendered
from diff_dalle.models import layers
from diff_dalle.models.attention import SelfAttention
from diff_dalle.models.cost import count_flops, peak_bytes
from diff_dalle.models.decoder.config import DecoderUnetConfig
from diff_dalle.models.decoder.unet import DecoderUnet
from diff_dalle.models.generator import Generator
from diff_dalle.models.latent.semantic import SEMANTIC_SIZES
from diff_dalle.models.latent.stage_a import STAGE_A_SIZES
from diff_dalle.models.latent.stages import STAGE_B_SIZES, STAGE_C_SIZES
from diff_dalle.models.layers import to_channels_last
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.recipes.planning.cost import IMAGES, NetworkCost, networks_of
from diff_dalle.recipes.planning.step import process_memory

ROOT = Path(__file__).parent.parent.parent
UPSAMPLER = {**TINY, "image_size": 32, "small_size": 8, "attention_resolutions": "none"}
FAMILIES = {ending: [name + ending for name in FULL_SIZE] for ending in ENDINGS}


def costs_of(run, vocab_size=100):
    return NetworkCost(find_kind(run.kind).of_run(run), vocab_size)


def parsed(name):
    return parse_info(["--preset", name])


# ---------------------------------------------------------------------------------------------------------- the costs


def test_peak_of_a_chain_is_what_can_be_counted_by_hand():
    """Each squaring saves its input; the backward pass adds two gradients while one saved input is still alive."""

    class Chain(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = x.square()
            return x

    x = torch.zeros(256, device="meta", requires_grad=True)
    forward = 4 * 1024  # the results of all four; the first input was there before
    found = peak_bytes(Chain(), lambda model: model(x))
    assert forward + 1024 <= found <= forward + 4 * 1024


def test_parameters_and_their_gradients_are_not_activations():
    with torch.device("meta"):
        model, x = nn.Linear(1000, 1000, bias=False), torch.zeros(1, 1000)
        assert count_flops(model, lambda network: network(x)) == 2 * 10**6
        peak = peak_bytes(model, lambda network: network(x))
    assert peak < 4 * 10**6 + 3 * 4000  # one temporary gradient of the weights


def test_attention_is_measured_without_its_weights():
    """As computed by fused kernels: memory is proportional to the tokens; and torch is unchanged afterwards."""
    plain, sizes = F.scaled_dot_product_attention, []
    for tokens in (4096, 8192):
        with torch.device("meta"):
            model, x = SelfAttention(8, 2), torch.zeros(1, tokens, 8)
            sizes.append(peak_bytes(model, lambda network, x=x: network(x)))
    assert sizes[1] < 2.1 * sizes[0] and sizes[1] < 8192**2
    assert F.scaled_dot_product_attention is plain


def decoder_pass():
    """A decoder's U-Net, and a forward pass through it."""
    config = DecoderUnetConfig(dim=32, image_embed_dim=32, cond_dim=16, dim_mults=(1, 2), attn_heads=2)

    def forward(network):
        cond = Conditioning(image_embedding=torch.zeros(2, 32))
        return network(torch.zeros(2, 3, 32, 32), torch.zeros(2), cond)

    return lambda: DecoderUnet(config), forward


def run_pass(run):
    """The network of a run, and a forward pass through it."""
    settings = find_kind(run.kind).of_run(run)
    probe = settings.probe()
    return lambda: settings.build(100), lambda network: probe.forward(network, 2, probe.sizes[1])


LATENT = {
    "stage_a": STAGE_A_SIZES, "semantic": SEMANTIC_SIZES, "stage_b": STAGE_B_SIZES, "stage_c": STAGE_C_SIZES,
}  # fmt: skip


def latent_settings(name):
    """Of the tiny network of a latent cascade at 64 pixels."""
    settings = find_kind(name)(model=LATENT[name]["tiny"])
    if name in ("stage_b", "stage_c"):
        settings = dataclasses.replace(settings, trained_with=TrainedWith(image_size=64, semantic_stride=8))
    return settings


def latent_pass(name):
    """As ``run_pass``."""
    settings = latent_settings(name)
    return lambda: settings.build(100), lambda network: settings.probe().forward(network, 2, 64)


@pytest.fixture
def known(monkeypatch):
    """Memory is not measured, which takes time: a quarter of a GiB for each image, in bf16 one GiB more for all."""
    monkeypatch.setattr(NetworkCost, "_peak", lambda self, n, checkpoint, accumulates, half: n * 2**28 + half * 2**30)


PASSES = {
    "generator": lambda: run_pass(make_run(image_size=32)),
    "upsampler": lambda: run_pass(make_run(settings=UPSAMPLER)),
    "classifier": lambda: run_pass(make_run(ClassifierRun, TINY_CLASSIFIER, image_size=32)),
    "decoder": decoder_pass,
    **{name: functools.partial(latent_pass, name) for name in LATENT},
}


@pytest.mark.parametrize("name", PASSES)
def test_the_peak_is_that_of_a_pass_on_a_device(name):
    """The same tensors are alive there, in the same layout: a copy to another one would count."""
    build, forward = PASSES[name]()
    peaks = []
    for device in ("meta", "cpu"):
        with torch.device(device):
            peaks.append(peak_bytes(to_channels_last(build()), forward))
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


def test_the_memory_of_a_preset_is_that_of_its_own_micro_batch():
    """Also where most of the peak of a few images is the gradient of a weight: 4 images of this classifier have three
    times as much for each as 128."""
    run, (cost,) = preset_networks("shapes_32_classifier")
    images = run.microbatch
    with torch.device("meta"):
        network = to_channels_last(cost.settings.build(512))
        peak = peak_bytes(network, lambda net: cost.probe.forward(net, images, cost.trained))
    assert images * cost.activation_bytes(False) == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", ["stage_b", "stage_c"])
def test_the_peak_in_half_precision_is_that_of_a_pass_on_a_device(name):
    """Copies of the weights and what grows with the images, told apart."""
    cost = NetworkCost(latent_settings(name), 100)
    half = cost.half_cost(False)

    def peak(on):
        def call(network):
            with torch.autocast("cpu", torch.bfloat16, on):
                return cost.probe.forward(network, 6, cost.trained)

        return peak_bytes(cost.build(False), call)

    assert half.copy_bytes + 6 * half.activation_bytes == pytest.approx(peak(True), rel=0.02)
    assert half.copy_bytes > 0 and 0.4 < 6 * half.activation_bytes / peak(False) < 0.85


def test_a_decoders_file_says_what_each_unet_makes_from_what(tmp_path, monkeypatch, known):
    """Of all U-Nets that it holds."""
    clip = ClipConfig("diff_dalle", "clip.pt", "diff_dalle:0123")
    decoder = make_decoder(2, unets=(TEXT_UNET, UNET), clip=clip, sample_timesteps=(4, None), predict_v=(False, True))
    text = describe_file(save_decoder(tmp_path / "decoder.pt", decoder))
    first = (
        "unet0: 8×8 pixels from an image embedding of width 6 and text of 4 tokens of width 5; cosine schedule of 50 "
        "steps, predicts eps, variance learned_range; sampled by ddim in 4 steps"
    )
    last = (
        "unet1: 16×16 pixels from 8×8 ones; cosine schedule of 50 steps, predicts v, variance learned_range; sampled "
        "by ancestral in all steps"
    )
    assert text.splitlines()[1:4] == [first, last, f"CLIP of the embeddings and texts: {clip}"]
    assert text.index("unet0:\n") < text.index("unet1:\n") and text.count(" parameters;") == 2
    for i in range(2):
        count = sum(parameter.numel() for parameter in make_network(decoder, i).parameters())
        assert f"unet{i}:\n{count:,} parameters" in text
        alone = describe_file(save_unet(tmp_path / f"{i}.pt", decoder, i))
        assert f"(trainee unet{i})" in alone and f"\n{count:,} parameters" in alone
        assert alone.splitlines()[1] == (first, last)[i] and (first, last)[1 - i] not in alone
        assert ("CLIP of the embeddings" in alone) == (i == 0)
    cropped = make_decoder(2, use_noise_for_lowres_cond=(True,), random_crop_sizes=(8,))
    alone = describe_file(save_unet(tmp_path / "cropped.pt", cropped, 1))
    assert "EMA weights of a decoder (trainee unet1) after 11 steps" in alone
    assert "decoder.unets" not in alone and "unets[1].dim 8" in alone
    assert "image of 16×16 pixels" in alone and "images of 8×8 pixels" in alone
    monkeypatch.setattr("diff_dalle.commands.info.cost_parts", lambda _: ("", ""))  # have no part in what follows
    bare = describe_file(save_decoder(tmp_path / "bare.pt", make_decoder()))
    assert "CLIP of the embeddings and texts: not recorded" in bare
    free = describe_file(save_decoder(tmp_path / "free.pt", make_decoder(unconditional=True)))
    assert "unet0: 8×8 pixels from noise alone; " in free and "CLIP of the" not in free


def test_recomputed_activations_count_while_they_are_alive():
    """With use_checkpoint the peak includes the largest block, not only the activations saved between blocks."""
    run = make_run(image_size=64, channel_mult="1", attention_resolutions="none")
    costs = costs_of(run)
    one_map = 4 * 16 * 64 * 64  # bytes of a feature map of one image
    saved = (1 + 1 + 3) * one_map  # the inputs of all blocks; of two that are concatenated no copy
    assert saved < costs.activation_bytes(True) < 0.75 * costs.activation_bytes(False)


def test_an_upsampler_trained_on_crops_has_the_memory_of_a_crop_and_the_flops_of_the_whole_image():
    run = make_run(settings=UPSAMPLER)
    whole, crop = (costs_of(make_run(settings=UPSAMPLER, crop_size=size)) for size in (0, 16))
    smaller = make_run(settings={**UPSAMPLER, "image_size": 16, "small_size": 4})
    alone = costs_of(smaller)
    assert crop.flops(crop.size) == whole.flops(whole.size) > 3 * alone.flops(alone.size)
    assert crop.activation_bytes() == alone.activation_bytes() < whole.activation_bytes()
    assert crop.parameters == sum(p.numel() for p in Generator(run.model, 100).parameters())


# ---------------------------------------------------------------------------------------------------- the description


def save_network(run, path, role="ema", state=None):
    session = run.recipe().open(ALONE)
    state = session.network().state_dict() if state is None else state
    save_file(str(path), role, session.identity(), 3, 24, state)
    return session.tokenizer.vocab_size


def test_files_of_upsamplers_are_described(tmp_path, known):
    run = make_run(settings=UPSAMPLER, crop_size=16, noise_augmentation=0.25)
    vocab_size = save_network(run, tmp_path / "ema.pt")
    text = describe_file(str(tmp_path / "ema.pt"))
    assert "holds EMA weights of a generator after 3 steps and 24 samples; tokenizer wordnet-" in text
    assert "small_size 8" in text and "noise_augmentation 0.25" in text and "channel_mult 1.0,2.0," in text
    assert rendered(cost_parts(costs_of(run, vocab_size))) in text
    assert "| 4 | 1.00 | 1.00 | 1.01 | 1.01 | 2.01 | 2.01 |" in text
    assert run_script("info.py", "--model_path", tmp_path / "ema.pt").stdout == f"{text}\n"
    flags = {**UPSAMPLER, "crop_size": 16, "noise_augmentation": 0.25, "microbatch": 8}
    cost = describe(parse_info([f"--{name}={value}" for name, value in flags.items()]))
    assert "16×16 pixels" in cost and "one image of 32×32" in cost and "microbatch 8, as set: " in cost
    assert describe(parse_info(["--model_path", str(tmp_path / "ema.pt")])) == text
    with pytest.raises(InputError, match=r"ema\.pt says all settings itself: leave out num_channels"):
        describe(parse_info(["--model_path", str(tmp_path / "ema.pt"), "--num_channels", "64"]))


def test_the_sections_are_those_of_the_kind(tmp_path, known):
    """Each section of what the kind's networks are set by, and no other."""
    for run in (make_run(), make_run(ClassifierRun, TINY_CLASSIFIER)):
        save_network(run, tmp_path / "model.pt", "model")
        text = describe_file(str(tmp_path / "model.pt"))
        settings = [field.name for field in dataclasses.fields(find_kind(run.kind))]
        shown = [line.partition(":")[0] for line in text.splitlines()[1 : 1 + len(settings)]]
        assert shown == settings and text.splitlines()[1 + len(settings)] == ""
    assert "classifier_width 16" in text and "noised True" in text


def test_optimizer_files_say_what_they_are(tmp_path):
    save_network(make_run(), tmp_path / "opt.pt", "optimizer", {"step": 3})
    text = describe_file(str(tmp_path / "opt.pt"))
    assert "holds an optimizer's state of a generator after 3 steps" in text
    assert text.endswith(
        "It resumes training and holds no weights: those are in model….pt and ema_….pt of the same step."
    )


def test_the_kind_is_that_of_the_preset_or_flag(known):
    assert parsed("classifier_64_tiny").kind == "classifier" and parsed("shapes_32").kind == "generator"
    assert parse_info([]).kind == "generator" and parse_info(["--kind", "classifier"]).kind == "classifier"
    assert "5,464,908 parameters" in run_script("info.py", "--preset", "generator_64_tiny").stdout


def test_adapters_are_described_by_their_checkpoints_alone():
    """Their settings have a ``--model_path`` of their own, and do not tell their networks."""
    assert "shapes_32" in whole_presets() and "shapes_32_canny" not in whole_presets()
    with pytest.raises(InputError, match="must be one of generator, classifier, .*: an adapter depends on its base"):
        parse_info(["--kind", "controlnet"])


# --------------------------------------------------------------------------------------------------------- the presets


def test_every_preset_of_a_cascade_is_in_a_family():
    known = {name for name in preset_names() if name.split("_")[0] in ("generator", "upsampler", "classifier")}
    assert {name for family in FAMILIES.values() for name in family} == known


@pytest.mark.parametrize("ending", ENDINGS)
def test_stages_of_a_cascade_follow_each_other(ending):
    base, middle, last, classifier = map(parsed, FAMILIES[ending])
    assert not base.model.is_upsampler and base.image_size == 64
    assert (middle.model.low_res.small_size, middle.image_size) == (base.image_size, 256)
    assert (last.model.low_res.small_size, last.image_size) == (middle.image_size, 1024)
    assert classifier.model.image_size == base.image_size
    for name in ("noise_schedule", "diffusion_steps", "rescale_timesteps"):
        assert getattr(classifier.diffusion, name) == getattr(base.diffusion, name)
    assert classifier.tokenizer == base.tokenizer
    assert last.augmentation.crop_size == middle.image_size


def test_the_full_size_family_has_about_one_and_a_half_billion_parameters():
    assert 1.4e9 <= sum(network.parameters for name in FULL_SIZE for network in preset_networks(name)[1]) <= 1.6e9


@pytest.mark.parametrize("name", FAMILIES["_small"])
def test_small_presets_fit_a_card_of_12_gb(name):
    """In fp32, with their own microbatch."""
    run, (cost,) = preset_networks(name)
    assert cost.training_bytes(run.microbatch) < 12e9


def test_recomputing_saves_most_of_the_activations(monkeypatch):
    """Of those of a network that keeps all; without checkpointing, one keeps no inputs of its blocks' convolutions."""
    _, (cost,) = preset_networks("upsampler_256_small")
    plain, checkpointed = (cost.activation_bytes(on) for on in (False, True))
    monkeypatch.setattr(layers, "output_again", lambda out: None)
    kept = NetworkCost._peak.__wrapped__(cost, IMAGES, False, True, False) / IMAGES  # measures again
    assert checkpointed <= 0.45 * kept and plain <= 0.65 * kept


@pytest.mark.parametrize("name", FAMILIES["_tiny"])
def test_tiny_presets_are_tiny(name):
    run, (cost,) = preset_networks(name)
    assert cost.parameters < 6e6 and cost.training_bytes(run.microbatch) < 1e9


def test_the_table_in_the_documents_is_up_to_date():
    """All costs of the smallest network of each kind, those of all take minutes; else what is known at once."""
    text = (ROOT / "diff_dalle/presets/README.md").read_text(encoding="utf-8")
    _, table, _ = re.split("<!-- /?presets -->", text)
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if "`" in line]
    advice, total, least = "run python scripts/readme_flags.py", 0, {}
    for name in whole_presets():
        recipe, networks = preset_networks(name)
        sizes = [network.parameters for network in networks]
        known = [(str(each.size), f"{each.parameters / 1e6:,.1f}", str(recipe.microbatch)) for each in networks]
        assert [(row[2], row[3], row[7]) for row in rows if row[0] == f"`{name}`"] == known, advice
        total += sum(sizes) if name in FULL_SIZE else 0
        least[recipe.settings.kind] = min(least.get(recipe.settings.kind, (1e9, "")), (sum(sizes), name))
    for _, name in least.values():
        own = [row for row in rows if row[0] == f"`{name}`"]
        assert own == [list(map(str, row)) for row in preset_rows(name)], advice
    assert len(least) == 7 and f"= {total / 1e6:,.0f} M parameters." in table, advice


# ---------------------------------------------------------------------------------------------------- several processes


def test_the_largest_network_trains_on_eight_gpus_of_80_gb():
    """3.6 billion parameters with activation checkpointing; one process, or eight that share nothing, cannot."""
    _, (network,) = preset_networks("cascade_stage_c_3b")
    eight = parsed("cascade_stage_c_3b").recipe(8)
    cost = dataclasses.replace(network, settings=network.probe.with_checkpoint(True))
    assert cost.parameters > 3.5e9
    found = process_memory(eight, cost, 8)
    assert found.total < 80e9 and found.held < 0.13 * 16 * cost.parameters
    assert cost.training_bytes(eight.microbatch) > 80e9
    whole = process_memory(eight, cost, 1)
    assert whole.held == 16 * cost.parameters


def test_gathered_weights_follow_the_settings(known):
    """At most all weights and all gradients; less with blocks that are freed, and with a single micro-batch."""

    def gathered(*flags):
        recipe = parse_info([*TINY_FLAGS, "--parallel", "fsdp", *flags]).recipe()
        (cost,) = networks_of(recipe)
        return process_memory(recipe, cost, 4).gathered / (4 * cost.parameters)

    least = gathered()
    assert least < gathered("--forward_prefetch", "3") < gathered("--reshard_after_forward", "False") < 2
    assert gathered("--microbatch", "1") > least + 0.2


TINY_FLAGS = [f"--{name}={value}" for name, value in TINY.items()]


def test_the_memory_of_each_process_is_printed(known):
    text = describe(parse_info([*TINY_FLAGS, "--parallel", "fsdp", "--processes", "4"]))
    assert "On each of 4 processes (--parallel fsdp): " in text and "for its share of weights" in text
    assert "Each of 4 processes needs as much" in describe(parse_info([*TINY_FLAGS, "--processes", "4"]))
    assert "processes" not in describe(parse_info(TINY_FLAGS))
    with pytest.raises(InputError, match="hsdp shares the weights among 3 processes, but there are 4"):
        describe(parse_info([*TINY_FLAGS, "--parallel", "hsdp", "--shard_processes", "3", "--processes", "4"]))
    with pytest.raises(InputError, match="a stage_a cannot be sharded: set --parallel ddp"):
        describe(parse_info(["--preset", "cascade_stage_a_tiny", "--processes", "2", "--set", "use_fsdp=True"]))
