"""Training stage B together with the semantic encoder that it reads, as in Würstchen (Pernias et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..batch import Batch
from ..diffusion.log_snr import LogSnrProcess
from ..models.latent.semantic import SemanticAutoencoder
from ..models.latent.unet import LatentUnet
from ..randomness import Draw
from .calibration import Calibrating
from .latent import SEMANTIC, StageBTask, StageBTaskConfig
from .semantic import OBSERVED, autoencoding_losses, follow


class JointStageBTask(Calibrating, StageBTask):
    """Stage B and its semantic encoder under one optimizer: the encoder learns what helps stage B. Its previewer learns
    small pictures from the latents, which it does not change.

    semantic: no companion, but trained, and saved with the optimizer's state.
    """

    trains_conditions = True

    def __init__(
        self, model: LatentUnet, process: LogSnrProcess, config: StageBTaskConfig, semantic: SemanticAutoencoder
    ):
        super().__init__(model, process, config)
        self.semantic = semantic.thaw().train()
        self.observed = (*self.observed, *OBSERVED)

    def part_modules(self, part: str) -> Mapping[str, nn.Module]:
        return {**super().part_modules(part), SEMANTIC: self.semantic}

    @property
    def encoder(self) -> SemanticAutoencoder:
        return self.semantic

    def losses(self, batch: Batch, draw: Draw) -> dict[str, Tensor]:
        named, preview = super().losses(batch, draw), autoencoding_losses(self.semantic, batch.images, frozen=True)
        error = preview.pop("loss")
        return {**named, **preview, "loss": named["loss"] + error, "preview": error.detach()}

    def observe(self, values: Mapping[str, Tensor]) -> None:
        super().observe(values)
        self.updates += 1
        follow(self.semantic, values, self.updates)
