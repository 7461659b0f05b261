"""Whose faces a picture shows as a control. The networks that find and describe faces are a plug-in; the bundled one is
over insightface."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...config import option, settings
from ...randomness import Draw
from ..plugins import import_package, load_plugin
from .contract import ControlFilter, Materials

WIDTH = 512  # of the vector that describes a face
STRIDE = 32  # pixels per position of the control
MODELS = "buffalo_l"  # of insightface: the detector and the ArcFace of the published identity filter


@dataclass(frozen=True)
class Face:
    """box: (top, left, bottom, right) in pixels. vector: float32 [512], of unit norm."""

    box: tuple[float, float, float, float]
    vector: np.ndarray


#: A picture uint8 [H, W, 3] → its faces, the most prominent one first.
FindFaces = Callable[[np.ndarray], Sequence[Face]]


@functools.cache
def faces_of_insightface() -> FindFaces:
    """Faces by insightface's detector (Guo et al. 2022), described by its ArcFace (Deng et al. 2019), on the CPU.

    The package fetches these networks into its own cache when it does not have them.
    """
    package: Any = import_package("insightface.app", "faces", "finding faces")
    app = package.FaceAnalysis(name=MODELS, allowed_modules=["detection", "recognition"])
    app.prepare(ctx_id=-1)
    return functools.partial(_faces, app)


def _faces(app: Any, picture: np.ndarray) -> list[Face]:
    found = []
    for face in app.get(np.ascontiguousarray(picture[..., ::-1])):  # it reads blue first
        left, top, right, bottom = map(float, face.bbox)
        found.append(Face((top, left, bottom, right), np.asarray(face.normed_embedding, dtype=np.float32)))
    return found


@settings
class IdentityParams:
    """Face identity"""

    faces: str = option(
        "",
        "face detector and encoder: insightface (extra faces) or a plug-in; empty = the only installed plug-in, else "
        "insightface",
    )
    max_faces: int = option(4, "maximum faces per picture", least=1, most=100)
    p_drop: float = option(0.05, "probability of dropping each face", least=0, most=1)
    p_full: float = option(0.3, "probability that a single face fills the whole control", least=0, most=1)


class IdentityFilter(ControlFilter):
    """512 channels for each 32 pixels: the vector of the face there, 0 without one."""

    params = IdentityParams
    config: IdentityParams
    channels = WIDTH

    def __init__(self, params: IdentityParams, materials: Materials):
        super().__init__(params, materials)
        self.find: FindFaces = load_plugin("diff_dalle.faces", params.faces, "controlnet_filter_params.faces")

    def __call__(self, pictures: Tensor, draw: Draw, masks: Tensor | None = None) -> Tensor:
        height, width = pictures.shape[2:]
        control = torch.zeros(len(pictures), WIDTH, -(-height // STRIDE), -(-width // STRIDE))
        full = (draw.uniform("control full") < self.config.p_full).tolist()
        dropped = [
            (draw.uniform(f"control face {i}") < self.config.p_drop).tolist() for i in range(self.config.max_faces)
        ]
        pixels = (255 * pictures).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        for i, picture in enumerate(pixels):
            faces = list(self.find(picture))[: self.config.max_faces]
            for number, face in enumerate(faces):
                if dropped[number][i]:
                    continue
                vector = torch.from_numpy(np.asarray(face.vector, dtype=np.float32))
                if len(faces) == 1 and full[i]:
                    control[i] = vector[:, None, None]
                else:
                    top, left, bottom, right = (int(length // STRIDE) for length in face.box)
                    control[i, :, max(top, 0) : bottom + 1, max(left, 0) : right + 1] = vector[:, None, None]
        return control.to(pictures.device)

    def shown(self, control: Tensor, pictures: Tensor) -> Tensor:
        """The picture, darker where there is no face."""
        faces = control.square().sum(1, keepdim=True).clamp(max=1)
        return pictures * (0.3 + 0.7 * F.interpolate(faces, pictures.shape[2:], mode="nearest"))
