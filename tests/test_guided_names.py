"""A script written against Guided-Diffusion's names alone, and what its objects are here."""

import argparse
import contextlib
import copy
import itertools
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from others import Other
from torch.optim import AdamW

import diff_dalle
from diff_dalle import dist_util, logger, nn, script_util
from diff_dalle.checkpoints.loading import open_network
from diff_dalle.commands.convert import ConvertConfig, convert
from diff_dalle.gaussian_diffusion import ModelMeanType, ModelVarType
from diff_dalle.models.generator import GeneratorConfig
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.transformer import DenoiserConfig
from diff_dalle.nn import mean_flat, timestep_embedding, update_ema
from diff_dalle.resample import LossSecondMomentResampler, create_named_schedule_sampler
from diff_dalle.respace import SpacedDiffusion, space_timesteps
from diff_dalle.script_util import (
    add_dict_to_argparser,
    args_to_dict,
    classifier_and_diffusion_defaults,
    classifier_defaults,
    create_classifier,
    create_classifier_and_diffusion,
    create_model_and_diffusion,
    model_and_diffusion_defaults,
    sr_create_model_and_diffusion,
    sr_model_and_diffusion_defaults,
)
from diff_dalle.unet import EncoderUNetModel, SuperResModel, UNetModel

CLASSES, SIZE, STEPS = 3, 16, 20
NETWORK = ["--image_size", "16", "--num_channels", "32", "--num_res_blocks", "1", "--channel_mult", "1,2"]
NETWORK += ["--attention_resolutions", "8", "--num_heads", "2", "--class_cond", "True", "--resblock_updown", "True"]
PROCESS = [
    "--diffusion_steps",
    str(STEPS),
    "--noise_schedule",
    "cosine",
    "--learn_sigma",
    "True",
    "--timestep_respacing",
]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The job of a script, and its log directory."""
    folder = tmp_path_factory.mktemp("script")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script_util, "NUM_CLASSES", CLASSES)
        patch.setattr(script_util, "_CLASSIFIER_HEADS", 16)
        patch.setenv("OPENAI_LOGDIR", str(folder))
        patch.setenv("OPENAI_LOG_FORMAT", "csv,log")
        dist_util.setup_dist()
        torch.set_num_threads(threads)
        logger.configure()
        yield folder
        logger.reset()
        dist_util._job.close()


def data(count=4):
    """Endless batches of images of one color for each class."""
    draw = torch.Generator().manual_seed(0)
    while True:
        classes = torch.randint(CLASSES, (count,), generator=draw)
        colors = F.one_hot(classes, 3).float() - 0.5
        yield colors[:, :, None, None].expand(-1, -1, SIZE, SIZE).contiguous(), {"y": classes}


def arguments(defaults, *flags):
    parser = argparse.ArgumentParser()
    add_dict_to_argparser(parser, defaults)
    return parser.parse_args(flags)


def train(folder):
    """Ten steps of a generator, by the script's own loop."""
    args = arguments({"lr": 1e-3, "ema_rate": 0.9, **model_and_diffusion_defaults()}, *NETWORK, *PROCESS, "")
    model, diffusion = create_model_and_diffusion(**args_to_dict(args, model_and_diffusion_defaults().keys()))
    model.to(dist_util.dev())
    dist_util.sync_params(model.parameters())
    average = copy.deepcopy(model)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    sampler = create_named_schedule_sampler("uniform", diffusion)
    for step, (batch, cond) in enumerate(itertools.islice(data(), 10)):
        t, weights = sampler.sample(len(batch), dist_util.dev())
        losses = diffusion.training_losses(model, batch, t, model_kwargs=cond)
        optimizer.zero_grad()
        (losses["loss"] * weights).mean().backward()
        optimizer.step()
        update_ema(average.parameters(), model.parameters(), rate=args.ema_rate)
        logger.logkv("step", step)
        for name, value in losses.items():
            logger.logkv_mean(name, value.detach().mean())
        logger.dumpkvs()
    for name, network in (("model", model), ("ema", average)):
        torch.save(network.state_dict(), f"{folder}/{name}.pt")
    return model


def train_classifier(folder):
    """Ten steps of a classifier."""
    flags = ["--image_size", "16", "--classifier_width", "16", "--classifier_depth", "1"]
    flags += ["--classifier_attention_resolutions", "8", *PROCESS, ""]
    args = arguments(classifier_and_diffusion_defaults(), *flags)
    model, diffusion = create_classifier_and_diffusion(**args_to_dict(args, classifier_and_diffusion_defaults()))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    sampler = create_named_schedule_sampler("loss-second-moment", diffusion)
    for batch, extra in itertools.islice(data(), 10):
        t, _ = sampler.sample(len(batch), dist_util.dev())
        loss = F.cross_entropy(model(diffusion.q_sample(batch, t), timesteps=t), extra["y"], reduction="none")
        sampler.update_with_local_losses(t, loss.detach())
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    path = os.path.join(logger.get_dir(), "classifier.pt")
    torch.save(model.state_dict(), path)
    return path, args


def sample(path, classifier_path, classifier_args, use_ddim):
    """As scripts/classifier_sample.py."""
    args = arguments({**model_and_diffusion_defaults(), **classifier_defaults()}, *NETWORK, *PROCESS, "5")
    model, diffusion = create_model_and_diffusion(**args_to_dict(args, model_and_diffusion_defaults().keys()))
    model.load_state_dict(dist_util.load_state_dict(path, map_location="cpu"))
    model.eval()
    classifier = create_classifier(**args_to_dict(classifier_args, classifier_defaults().keys()))
    classifier.load_state_dict(dist_util.load_state_dict(classifier_path, map_location="cpu"))
    classifier.eval()

    def cond_fn(x, t, y=None):
        with torch.enable_grad():
            x_in = x.detach().requires_grad_(True)
            chosen = F.log_softmax(classifier(x_in, t), dim=-1)[range(len(x)), y.view(-1)]
            return torch.autograd.grad(chosen.sum(), x_in)[0]

    loop = diffusion.ddim_sample_loop if use_ddim else diffusion.p_sample_loop
    torch.manual_seed(0)
    classes = torch.tensor([0, 2])
    images = loop(model, (2, 3, SIZE, SIZE), model_kwargs={"y": classes}, cond_fn=cond_fn, device=dist_util.dev())
    gathered = [torch.zeros_like(images) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, images)
    dist.barrier()
    return gathered[0], (model, classifier, classes)


def own_sample(network, classifier, classes, use_ddim):
    """What ``sample`` makes, by this library's own objects."""
    process = SpacedDiffusion(
        use_timesteps=space_timesteps(STEPS, "5"),
        betas=diff_dalle.get_named_beta_schedule("cosine", STEPS),
        model_mean_type=ModelMeanType.EPSILON,
        model_var_type=ModelVarType.LEARNED_RANGE,
        loss_type=diff_dalle.LossType.MSE,
    )

    def denoiser(x, t, y=None):
        return network.unet(x, t, diff_dalle.Conditioning(labels=y))

    def gradient(x, t, y=None):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            chosen = super(EncoderUNetModel, classifier).forward(x, t).log_softmax(1).gather(1, y[:, None])
            return torch.autograd.grad(chosen.sum(), x)[0]

    loop = process.ddim_sample_loop if use_ddim else process.p_sample_loop
    torch.manual_seed(0)
    return loop(denoiser, (2, 3, SIZE, SIZE), model_kwargs={"y": classes}, cond_fn=gradient, device="cpu")


def test_a_script_trains_ten_steps_and_samples_with_a_classifier(job):
    model = train(job)
    rows = (job / "progress.csv").read_text().splitlines()
    assert len(rows) == 11 and {"step", "loss", "vb", "mse"} <= {*rows[0].split(",")}
    states = [dist_util.load_state_dict(f"{job}/{name}.pt") for name in ("model", "ema")]
    assert {"time_embed.0.weight", "label_emb.weight", "middle_block.1.qkv.weight", "out.2.bias"} <= {*states[0]}
    assert states[0]["label_emb.weight"].shape[0] == CLASSES  # without our row for "no class"
    weight = "input_blocks.1.0.in_layers.2.weight"
    assert not torch.equal(*(state[weight] for state in states))

    path, classifier_args = train_classifier(job)
    for use_ddim in (False, True):
        images, (network, classifier, classes) = sample(f"{job}/ema.pt", path, classifier_args, use_ddim)
        assert images.isfinite().all() and images.std() > 0.1
        assert torch.equal(own_sample(network, classifier, classes, use_ddim), images)

    # convert.py reads such a file, with what its shapes do not tell.
    told = {"image_size": 16, "noise_schedule": "cosine", "num_heads": 2, "num_heads_upsample": -1}
    config = ConvertConfig(model_path=f"{job}/model.pt", out=f"{job}/own.pt", **told)
    convert(config)
    torch.manual_seed(1)
    x, t = torch.randn(2, 3, SIZE, SIZE), torch.tensor([3, 19])
    network = open_network(f"{job}/own.pt", "generator").load(torch.device("cpu"))
    own = network(x, t, diff_dalle.Conditioning(labels=classes))
    assert torch.equal(own, model.eval()(x, t, y=classes))
    with pytest.raises(ValueError, match="own.pt is a checkpoint of diff_dalle"):
        dist_util.load_state_dict(f"{job}/own.pt")


def test_losses_and_weights_are_those_of_our_own_objects(job):
    args = arguments(model_and_diffusion_defaults(), *NETWORK, *PROCESS, "")
    settings = args_to_dict(args, model_and_diffusion_defaults())
    torch.manual_seed(0)
    model, diffusion = create_model_and_diffusion(**settings)
    torch.manual_seed(0)
    unet = DenoiserConfig(16, 32, 1, (1.0, 2.0), (8,), 2, resblock_updown=True, num_classes=CLASSES)
    own = diff_dalle.Generator(GeneratorConfig(unet, TextEncoderConfig(enc_attn_dim=0)), 0, learned_variance=True)
    for network in (model, own):
        torch.manual_seed(1)
        torch.nn.init.normal_(network.unet.out_conv.weight)
    batch, extra = next(data())
    t, weights = create_named_schedule_sampler("uniform", diffusion).sample(4, "cpu")
    process = diff_dalle.create_gaussian_diffusion(
        diff_dalle.DiffusionConfig(diffusion_steps=STEPS, noise_schedule="cosine", variance="learned_range")
    )
    found = []
    for model_kwargs, network, each in (
        (extra, model, diffusion),
        ({"cond": diff_dalle.Conditioning(labels=extra["y"])}, own, process),
    ):
        torch.manual_seed(2)
        losses = each.training_losses(network, batch, t, model_kwargs=model_kwargs)
        bound = each.calc_bpd_loop(network, batch, model_kwargs=model_kwargs)
        found.append({**losses, **bound})
    assert found[0].keys() == found[1].keys() >= {"loss", "mse", "vb", "total_bpd", "xstart_mse"}
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert (weights == 1).all()

    with pytest.raises(ValueError, match="cond has no labels"):
        model(batch, t)
    with pytest.raises(ValueError, match="not class-conditional"):
        create_model_and_diffusion(**{**settings, "class_cond": False})[0](batch, t, y=extra["y"])
    with pytest.raises(TypeError, match="heads is no such setting"):
        create_model_and_diffusion(**settings, heads=1)
    with pytest.raises(TypeError, match="dropout is missing"):
        create_model_and_diffusion(**{name: value for name, value in settings.items() if name != "dropout"})
    with pytest.raises(TypeError, match="heads is no setting of a network"):
        UNetModel(16, 3, 32, 3, 1, (2,), heads=2)
    with pytest.raises(ValueError, match="dims is 3"):
        UNetModel(16, 3, 32, 3, 1, (2,), dims=3)


@pytest.mark.parametrize("new_order", [False, True])
def test_networks_compute_guided_diffusions_function_of_its_files(new_order):
    x, t, y = torch.randn(2, 3, SIZE, SIZE), torch.tensor([3, 900]), torch.tensor([1, 4])
    shape = {"channel_mult": (1, 2), "num_head_channels": 16, "use_scale_shift_norm": True, "resblock_updown": True}
    shape["use_new_attention_order"] = new_order
    low = torch.randn(2, 3, 8, 8)
    other = Other(classes=5, new_order=new_order)
    upsampler = Other(inputs=6, outputs=3, new_order=new_order)
    classifier = Other(pooled=10, outputs=0, new_order=new_order)
    for network, reference, given in (
        (UNetModel(16, 3, 32, 6, 1, (2,), num_classes=5, **shape), other, {"y": y}),
        (SuperResModel(16, 3, 32, 3, 1, (2,), **shape), upsampler, {"low_res": low}),
        (EncoderUNetModel(16, 3, 32, 10, 1, (2,), pool="attention", **shape), classifier, {}),
    ):
        network.load_state_dict(reference.file)
        for each in (network, copy.deepcopy(network)):
            torch.testing.assert_close(each.eval()(x, t, **given), reference(x, t, **given), atol=3e-5, rtol=1e-4)
        state = torch.nn.ModuleDict({"inner": network}).state_dict()
        assert {f"inner.{name}" for name in reference.file} == state.keys()
        assert all(torch.equal(state[f"inner.{name}"], value) for name, value in reference.file.items())
        network.convert_to_fp16()
        half = network(x, t, **given)
        assert 0 < (half - reference(x, t, **given)).abs().max() < 0.1
        network.convert_to_fp32()
        assert not torch.equal(half, network(x, t, **given))
        bad = {**reference.file, "x": torch.zeros(1), "out.0.weight": torch.zeros(3)}
        del bad["time_embed.0.bias"]
        with pytest.raises(RuntimeError) as problem:
            network.load_state_dict(bad)
        for text in ('Missing key(s) in state_dict: "time_embed.0.bias"', 'Unexpected key(s) in state_dict: "x"'):
            assert text in str(problem.value)
        assert "out.0.weight has the shape (3,), not (" in str(problem.value)
    with pytest.raises(ValueError, match="give low_res"):
        SuperResModel(16, 3, 32, 3, 1, (2,), **shape)(x, t)


def test_settings_of_upsamplers_and_classifiers():
    flags = ["--large_size", "64", "--small_size", "16", "--num_channels", "32", "--num_res_blocks", "1"]
    args = arguments(sr_model_and_diffusion_defaults(), *flags, "--attention_resolutions", "16,8", "--num_heads", "1")
    with torch.device("meta"):
        model, diffusion = sr_create_model_and_diffusion(**args_to_dict(args, sr_model_and_diffusion_defaults()))
        wide = script_util.create_model(512, 64, 1, attention_resolutions="32,16,8")
        upsampler = script_util.sr_create_model(512, 128, 64, 1, False, False, "32,16")
        assert EncoderUNetModel(64, 3, 64, 2, 1, (2, 4), pool="attention").config.tower.attention_resolutions == (
            32,
            16,
        )
    assert isinstance(model, SuperResModel) and diffusion.num_timesteps == 1000
    assert model.unet.config.mults == (1, 2, 3, 4) and model.unet.config.attention_resolutions == (16, 8)
    assert wide.unet.config.mults[0] == 0.5 and upsampler.unet.config.mults == (1, 1, 2, 2, 4, 4)
    with pytest.warns(UserWarning, match="lower resolution"):
        script_util.create_model(64, 32, 1, attention_resolutions="16,5")
    for pool in ("adaptive", "spatial", "spatial_v2"):
        classifier = EncoderUNetModel(16, 3, 32, 2, 1, (2,), channel_mult=(1, 2), pool=pool)
        classifier.load_state_dict(classifier.state_dict())
        assert classifier(torch.zeros(1, 3, 16, 16), torch.zeros(1)).shape == (1, 2)
    with pytest.raises(ValueError, match="pool is 'mean'"):
        EncoderUNetModel(16, 3, 32, 2, 1, (2,), channel_mult=(1, 2), pool="mean")


def test_processes_samplers_and_small_parts():
    process = script_util.create_gaussian_diffusion(sigma_small=True, use_kl=True, timestep_respacing="ddim25")
    assert (process.num_timesteps, process.loss_type.name, process.model_var_type.name) == (
        25,
        "RESCALED_KL",
        "FIXED_SMALL",
    )
    sampler = create_named_schedule_sampler("loss-second-moment", process)
    assert isinstance(sampler, LossSecondMomentResampler) and sampler.weights().tolist() == [1 / 25] * 25
    for _ in range(10):
        sampler.update_with_local_losses(torch.arange(25), torch.arange(25).float())
    assert sampler.weights().argmax() == 24
    np.random.seed(0)
    drawn, weights = sampler.sample(1000, "cpu")
    np.random.seed(0)
    chosen = np.random.choice(25, 1000, p=sampler.weights() / sampler.weights().sum())
    assert drawn.tolist() == chosen.tolist() and weights.mean() == pytest.approx(1, abs=0.2)

    assert timestep_embedding(torch.tensor([0.5]), 6).shape == (1, 6)
    assert nn.conv_nd(1, 2, 4, 3)(torch.ones(1, 2, 9)).shape == (1, 4, 7)
    assert nn.avg_pool_nd(3, 2)(torch.ones(1, 1, 4, 4, 4)).shape == (1, 1, 2, 2, 2)
    assert not nn.zero_module(nn.linear(2, 3)).weight.any()
    assert mean_flat(torch.ones(2, 3, 4)).tolist() == [1, 1]
    assert script_util.str2bool("No") is False
    with pytest.raises(SystemExit), contextlib.redirect_stderr(None):
        arguments({"clip": True}, "--clip", "perhaps")


def test_messages_and_values_of_a_script(job, tmp_path):
    with logger.scoped_configure(str(tmp_path), ["csv", "log"]):
        assert logger.get_dir() == str(tmp_path)
        logger.set_level(logger.WARN)
        for level in ("debug", "info", "warn", "error"):
            getattr(logger, level)("this is", level)
        logger.logkvs({"step": 3, "a": 1.5})
        for value in (1.0, 3.0):
            logger.logkv_mean("b", value)
        assert logger.getkvs() == {"step": 3, "a": 1.5, "b": 2.0} == logger.dumpkvs()
        assert not logger.getkvs()
    text = (tmp_path / "log.txt").read_text()
    assert [name for name in ("debug", "info", "warn", "error") if f"this is {name}" in text] == ["warn", "error"]
    (names, values) = (line.split(",") for line in (tmp_path / "progress.csv").read_text().splitlines())
    assert {"step": "3", "a": "1.5", "b": "2.0"}.items() <= dict(zip(names, values, strict=True)).items()
    assert logger.get_dir() == str(job)
