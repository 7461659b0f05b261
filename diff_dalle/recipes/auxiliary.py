"""The auxiliary losses of a generator, alignment and perceptual: opens their frozen networks for its task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..config import Fault, InputError, named
from ..distributed.devices import without_values
from ..distributed.world import World
from ..embeddings.contract import weights_digest
from ..embeddings.patches import PatchEncoder, open_encoder
from ..evaluation.pretrained import LEAST_SIZES, Lpips
from ..tasks.alignment import ENCODER, Alignment, AlignmentConfig, find_block, make_projector, tokens_of
from ..tasks.denoising import DenoisingTask
from ..tasks.perceptual import FEATURES, NETWORK, Distance, Perceptual, PerceptualConfig, feature_distance
from ..training.settings import TrainingConfig
from .recipe import Session, check_same


def wrong_auxiliaries(run: Any, side: int, supported: bool = True) -> Iterator[Fault]:
    """side: of the training images in pixels, crops if there are any. supported: whether the kind of run has them."""
    alignment: AlignmentConfig = run.alignment
    perceptual: PerceptualConfig = run.perceptual
    training: TrainingConfig = run.training
    is_on = {"alignment_path": bool(alignment.alignment_path), "perceptual_weight": perceptual.perceptual_weight > 0}
    for setting in is_on:
        if is_on[setting] and not supported:
            yield Fault(setting, f"is for generators and their LoRAs, and this is a {run.kind}: leave it out")
    if alignment.alignment_path and alignment.alignment_until < 1 and not (training.iterations or training.samples):
        rule = f"is a share of {named('iterations')} or {named('samples')}, of which neither limits the run"
        yield Fault("alignment_until", f"{rule}: set one of them")
    least = LEAST_SIZES.get(perceptual.perceptual_net, 0)
    if perceptual.perceptual_weight and side < least:
        rule = f"needs images of {least} pixels, but these have {side}: choose another"
        yield Fault("perceptual_net", rule, perceptual.perceptual_net)


@dataclass(frozen=True)
class Auxiliaries:
    """The frozen networks of a run's auxiliary losses; None = it has no such loss."""

    encoder: PatchEncoder | None
    compared: nn.Module | None
    distance: Distance | None

    @classmethod
    def open(cls, run: Any, world: World) -> tuple[Auxiliaries, Any]:
        """And the run with the identities of their weights. InputError for files of anything else."""
        alignment: AlignmentConfig = run.alignment
        perceptual: PerceptualConfig = run.perceptual
        size = run.image_size
        encoder: PatchEncoder | None = None
        compared: nn.Module | None = None
        distance: Distance | None = None
        if path := alignment.alignment_path:
            encoder = open_encoder(path, world.device, "alignment_path", size, alignment.alignment_image_size)
            check_same(encoder.identity, alignment.alignment_encoder, "alignment_path", path)
            run = replace(run, alignment=replace(alignment, alignment_encoder=encoder.identity))
        if perceptual.perceptual_weight:
            path, net = perceptual.perceptual_path, perceptual.perceptual_net
            if net == FEATURES:
                features = open_encoder(path, world.device, "perceptual_path", size)
                compared, distance, identity = features, feature_distance(features), features.identity
            else:
                lpips = Lpips(net, path, world.device, "perceptual_path")
                compared, distance = lpips.network, partial(_in_color, lpips)
                identity = weights_digest(compared.state_dict())
            check_same(identity, perceptual.perceptual_encoder, "perceptual_path", path)
            run = replace(run, perceptual=replace(perceptual, perceptual_encoder=identity))
        return cls(encoder, compared, distance), run

    def join(self, task: DenoisingTask, session: Session) -> None:
        """Give a task its losses. InputError for a block that cannot be aligned. Every rank calls it."""
        recipe, run = session.recipe, session.settings
        if self.encoder is not None:
            config: AlignmentConfig = run.alignment
            block = find_block(task.model, config.alignment_block)
            channels = _channels(session, config.alignment_block)
            make = partial(make_projector, config, channels, self.encoder.channels, recipe.training.seed)
            until = recipe.training.position_at(config.alignment_until, session.world.size)
            task.alignment = Alignment(block, session.beside(make), config.alignment_weight, until)
            task.add_companion(ENCODER, self.encoder)
        if self.distance is not None and self.compared is not None:
            settings: PerceptualConfig = run.perceptual
            bounds = settings.perceptual_weight, settings.perceptual_snr
            task.perceptual = Perceptual(task.denoiser, task.process, self.distance, *bounds)
            task.add_companion(NETWORK, self.compared)


def _in_color(lpips: Lpips, images: Tensor, others: Tensor) -> Tensor:
    """LPIPS of RGB or gray images, in fp32."""
    with torch.autocast(images.device.type, enabled=False):
        return lpips(images.expand(-1, 3, -1, -1), others.expand(-1, 3, -1, -1))


def _channels(session: Session, name: str) -> int:
    """Of the tokens of a block, found without values. InputError for a block whose output has no grid."""
    probe, found = session.recipe.network.probe(), []
    side = probe.sizes[1]
    with without_values():
        vocabulary = session.tokenizer.vocab_size if session.tokenizer else 0
        network = session.recipe.network.build(vocabulary).eval()
        hook = find_block(network, name).register_forward_hook(lambda module, inputs, output: found.append(output))
        probe.forward(network, 1, side)
        hook.remove()
    if not found:
        rule = "is never called in a forward pass: name a module that is"
        raise InputError(Fault("alignment_block", rule, name))
    return tokens_of(found[-1], (side, side))[0].shape[2]
