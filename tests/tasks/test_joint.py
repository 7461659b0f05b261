"""Training stage B together with its semantic encoder."""

import torch
from test_latent_task import draw_of, make_batch, stage_b
from torch.testing import assert_close

from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.tasks.latent import SEMANTIC, STAGE_A
from diff_dalle.tasks.semantic import JointStageBTask


def make(diffusion=None, **settings) -> JointStageBTask:
    frozen = stage_b(diffusion, **settings)
    semantic = frozen.companions[SEMANTIC]
    task = JointStageBTask(frozen.model, frozen.process, frozen.config, semantic)
    task.add_companion(STAGE_A, frozen.companions[STAGE_A])
    return task


def gradients(task, batch) -> dict[str, torch.Tensor]:
    task.zero_grad()
    task.losses(batch, draw_of(batch))["loss"].sum().backward()
    return {name: p.grad.clone() for name, p in task.semantic.named_parameters()}


def test_stage_b_teaches_the_encoder_and_small_pictures_the_previewer():
    task, batch = make(), make_batch()
    before = gradients(task, batch)
    assert all(each.any() for each in before.values())
    with torch.no_grad():
        task.semantic.previewer.out_conv.bias += 1
    after = gradients(task, batch)
    for name, value in before.items():
        assert torch.equal(value, after[name]) != name.startswith("previewer."), name
    dropped = gradients(make(semantic_dropout=1.0), batch)  # stage B does not see the maps
    assert all(value.any() == name.startswith("previewer.") for name, value in dropped.items())


def test_the_loss_is_that_of_stage_b_and_of_the_previews():
    task, batch = make(), make_batch()
    named, alone = task.losses(batch, draw_of(batch)), stage_b().losses(batch, draw_of(batch))
    assert_close(named["mse"], alone["mse"])
    assert_close(named["loss"], alone["loss"] + named["preview"])
    assert not named["preview"].requires_grad and named["preview"].all()


def test_statistics_and_adaptive_weights_both_follow():
    task, batch = make(LogSnrConfig(loss_weighting=("adaptive",))), make_batch()
    assert task.observed == ("log_snr", "observed_mse", "norm_moments")
    for _ in range(12):
        named = task.losses(batch, draw_of(batch))
        task.observe({name: named[name].detach() for name in task.observed})
    with torch.no_grad():
        latents = task.semantic.encode(batch.images)
    assert latents.mean((0, 2, 3)).abs().max() < 0.2 and (latents.std((0, 2, 3)) - 1).abs().max() < 0.2
    assert (task.process.state_dict()["adaptive_weight"] != 1).any()
