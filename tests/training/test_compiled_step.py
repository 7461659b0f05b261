"""Steps that do not wait for the device, and steps with compiled blocks.

Graphs run uncompiled here; with "aot_eager" the backward pass is captured too, as for a real backend.
"""

from functools import partial

import pytest
import torch
from checkpoint_making import make_run
from marks import slow
from torch._dynamo.testing import CompileCounterWithBackend
from waiting import reads

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.models.units import compile_training
from diff_dalle.randomness import Draw
from diff_dalle.recipes import recipe
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.training.loop import TrainLoop

STEPS, LENGTH = 4, 6
TEXT = {"enc_attn_dim": 8, "enc_depth": 1, "enc_heads": 2}
COMMON = {
    "image_size": 8,
    "iterations": 30,
    "text_length": LENGTH,
    "diffusion_steps": 50,
    "warmup_steps": 7,
    "lr_anneal_steps": 30,
}
UNET = {"num_channels": 8, "channel_mult": "1", "num_res_blocks": 1, "attention_resolutions": 8, "dropout": 0.2}
GENERATOR = {**COMMON, **TEXT, **UNET, "sample_interval": 0}
UPSAMPLER = {**GENERATOR, "small_size": 4, "gaussian_blur": True, "noise_augmentation": 0.5}
CLASSIFIER = {
    **COMMON,
    **{f"classifier_{name}": value for name, value in TEXT.items()},
    "classifier_width": 8,
    "classifier_channel_mult": "1",
    "classifier_depth": 1,
    "classifier_attention_resolutions": 8,
    "classifier_dropout": 0.2,
}
GENERATOR |= {"schedule_sampler": "loss-second-moment"}
KINDS = {"generator": GENERATOR, "upsampler": UPSAMPLER, "classifier": CLASSIFIER}


def make_loop(kind, **changed):
    classifier = [ClassifierRun] if kind == "classifier" else []
    run = make_run(*classifier, settings=KINDS[kind], batch_size=4, **{"precision": "fp32", **changed})
    world = World(SINGLE, torch.device("cpu"))
    trainees = run.recipe().open(world).trainees(None)
    return TrainLoop(run.training, trainees, None, RunFolder(Identity("test", {}), path="unused"), world)


def batch(step):
    """Captions of other lengths in every step."""
    index = torch.arange(4 * step, 4 * step + 4)
    draw = Draw(9, index)
    tokens = (torch.stack([draw.uniform(f"token {i}") for i in range(LENGTH)], 1) * 50).long()
    mask = torch.arange(LENGTH) < 1 + (draw.uniform("length") * LENGTH).long()[:, None]
    return Batch(draw.normal("image", (3, 8, 8)).tanh(), Conditioning(tokens=tokens, mask=mask), index)


@pytest.mark.parametrize(
    ("kind", "microbatch", "precision"),
    [
        ("generator", 2, "fp32"), ("generator", 3, "fp16"), ("upsampler", 0, "bf16"),
        ("classifier", 4, "fp32"), ("classifier", 2, "fp16"), ("classifier", 2, "bf16"),
    ],
)  # fmt: skip
def test_steps_between_two_logs_never_wait_for_the_device(kind, microbatch, precision):
    """After the first step, which makes tables and the optimizer's state. Indices are on the CPU in any case."""
    loop = make_loop(kind, microbatch=microbatch, precision=precision)
    loop.update(batch(0))
    batches = [batch(step) for step in (1, 2)]
    with reads([each.index for each in batches]) as found:
        for each in batches:
            loop.update(each)
    assert found == []


@pytest.mark.parametrize(("kind", "microbatch"), [("generator", 2), slow("classifier", 2)])
def test_a_step_with_compiled_blocks_computes_the_same(kind, microbatch, monkeypatch):
    """Micro-batches of a classifier pass twice: without gradient, and with one."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(recipe, "compile_training", partial(compile_training, backend=counter))
    plain, compiled = (make_loop(kind, microbatch=microbatch, compile=compile) for compile in (False, True))
    for step in range(STEPS):
        # From the second step on, compiling again is an error.
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            for loop in (plain, compiled):
                loop.update(batch(step))
        expected, found = (loop.trainees[0].scalars() for loop in (plain, compiled))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    graphs = counter.frame_count
    task, (last, draw) = compiled.trainees[0].task.eval(), (batch(0), Draw(0, batch(0).index))
    with torch.no_grad():
        assert "loss" in task.held_out(last, draw) and counter.frame_count == graphs > 0  # evaluation is not compiled
