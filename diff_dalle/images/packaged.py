"""Bundled plug-ins, over other packages: what finds faces, and what finds what is salient.

Each is made by a function without arguments, which ``plugins.BUILT_IN`` names: it imports the package.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import InputError
from .decode import BrokenSample
from .plugins import import_package

if TYPE_CHECKING:
    from .control_filters.identity import Face

MODELS = "buffalo_l"  # of insightface: the detector and the ArcFace of the published identity filter


@functools.cache
def faces_of_insightface() -> Callable[[np.ndarray], Sequence[Face]]:
    """Faces by insightface's detector (Guo et al. 2022), described by its ArcFace (Deng et al. 2019), on the CPU.

    The package fetches these networks into its own cache when it does not have them.
    """
    package: Any = import_package("insightface.app", "faces", "finding faces")
    app = package.FaceAnalysis(name=MODELS, allowed_modules=["detection", "recognition"])
    app.prepare(ctx_id=-1)
    return functools.partial(_faces, app)


def _faces(app: Any, picture: np.ndarray) -> list[Face]:
    from .control_filters.identity import Face  # whose room needs ``plugins``

    found = []
    for face in app.get(np.ascontiguousarray(picture[..., ::-1])):  # it reads blue first
        left, top, right, bottom = map(float, face.bbox)
        found.append(Face((top, left, bottom, right), np.asarray(face.normed_embedding, dtype=np.float32)))
    return found


def saliency_of_opencv() -> Callable[[np.ndarray], np.ndarray]:
    """Fine-grained saliency (Montabone & Soto 2010), [h, w] in [0, 1]; it needs no weights."""
    package: Any = import_package("cv2", "saliency", "saliency")
    if not hasattr(package, "saliency"):
        raise InputError(
            "saliency requires the module cv2.saliency, which the installed OpenCV lacks: pip uninstall it, and pip "
            "install opencv-contrib-python-headless"
        )
    return opencv_saliency


def opencv_saliency(picture: np.ndarray) -> np.ndarray:
    """``saliency_of_opencv``, for pictures uint8 [h, w, 3]. BrokenSample for one of which OpenCV computes none."""
    import cv2

    package: Any = cv2
    found, map_ = package.saliency.StaticSaliencyFineGrained_create().computeSaliency(
        np.ascontiguousarray(picture[..., ::-1])
    )
    if not found:
        raise BrokenSample("OpenCV computes no saliency of it")
    return map_
