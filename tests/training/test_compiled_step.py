"""With ``compile``, a step's random numbers, network, losses and backward pass are one graph, the same in all steps.

The graphs run uncompiled here; with "aot_eager" the backward pass is captured too, as for a real backend.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from checkpoint_making import make_run
from torch._dynamo.testing import CompileCounterWithBackend
from toy import ToyTask
from waiting import reads

from diff_dalle.batch import Batch, Conditioning
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import RunFolder
from diff_dalle.distributed.world import SINGLE, World
from diff_dalle.models.compiling import compile_training
from diff_dalle.randomness import Draw
from diff_dalle.recipes.classifier import ClassifierRun
from diff_dalle.training import loop as training_loop
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.optim_config import OptimConfig
from diff_dalle.training.trainee import Trainee

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
    with reads() as found:
        loop.trainees[0].scalars()
    assert found


@pytest.mark.parametrize(
    ("kind", "microbatch", "graphs"), [("generator", 2, 1), ("upsampler", 0, 1), ("classifier", 2, 2)]
)
def test_a_step_is_one_graph_in_all_steps_and_computes_the_same(kind, microbatch, graphs, monkeypatch):
    """Micro-batches of a classifier pass twice: a graph without gradient, and one with."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(training_loop, "compile_training", partial(compile_training, backend=counter))
    plain, compiled = (make_loop(kind, microbatch=microbatch, compile=compile) for compile in (False, True))
    for step in range(STEPS):
        # From the second step on, compiling again is an error, as is a break of the graph in any.
        with torch._dynamo.config.patch(error_on_recompile=step > 0):
            for loop in (plain, compiled):
                loop.update(batch(step))
        expected, found = (loop.trainees[0].scalars() for loop in (plain, compiled))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert counter.frame_count == graphs
    task, (last, draw) = compiled.trainees[0].task.eval(), (batch(0), Draw(0, batch(0).index))
    assert "loss" in task.held_out(last, draw) and counter.frame_count == graphs  # evaluation is not compiled


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_captured_random_numbers_are_the_same(seed):
    """Bit for bit for keys and uniform numbers."""
    torch._dynamo.reset()

    class Drawing(torch.nn.Module):
        def forward(self, draw):
            return draw.keys("a"), draw.uniform("b"), draw.normal("c", (3, 5))

    draw, module = Draw(seed, torch.tensor([0, 1, 2**40, 2**62])), Drawing()
    expected = module(draw)
    compile_training(module, "eager")
    keys, uniform, normal = module(draw)
    assert torch.equal(keys, expected[0]) and torch.equal(uniform, expected[1]) and uniform.dtype == torch.float64
    torch.testing.assert_close(normal, expected[2], rtol=0, atol=2e-6)


def test_a_task_that_leaves_torch_is_not_captured(monkeypatch):
    """Its network is compiled where it is built."""
    calls = []
    monkeypatch.setattr(training_loop, "compile_training", calls.append)
    world = World(SINGLE, torch.device("cpu"))
    trainee = Trainee(ToyTask(), OptimConfig(), "fp32", world)
    config = replace(make_run(settings=GENERATOR).training, compile=True)
    TrainLoop(config, [trainee], None, RunFolder(Identity("test", {}), path="unused"), world)
    assert calls == []
