"""Other packages: those of extras, which are imported when they are asked for, and plug-ins by their entry points."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, version
from types import ModuleType
from typing import Any

from ..config import Fault, InputError, installed, loaded, nearest

#: The bundled ones, by group and name, each as what makes it.
BUILT_IN = {
    "diff_dalle.faces": {"insightface": "diff_dalle.images.control_filters.identity:faces_of_insightface"},
    "diff_dalle.saliency": {"opencv": "diff_dalle.images.transforms:saliency_of_opencv"},
}
NAMES = {"cv2": "opencv-contrib-python-headless"}  # of packages that are not called as their modules
WITH_TORCHVISION = ("open_clip", "torch_fidelity", "torchmetrics", "torchvision")


def import_package(module: str, extra: str, purpose: str) -> ModuleType:
    """A module of a package of an extra. InputError that says what to install."""
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise InputError(f"{purpose} cannot be had: {package} requires the package {error.name}") from error
        name = NAMES.get(package, package.replace("_", "-"))
        install = f"pip install 'diff_dalle[{extra}]'"
        raise InputError(f"{purpose} requires the package {name}: {install}") from None
    except Exception as error:  # torchvision raises RuntimeError, of operators that torch does not have
        reason = str(error).partition("\n")[0]
        if package not in WITH_TORCHVISION:
            raise InputError(f"{package} cannot be imported ({reason}), which {purpose} requires") from error
        raise InputError(
            f"{package} cannot be imported ({reason}), which {purpose} requires: torchvision must be built for the "
            f"installed torch {version('torch')}; install both from one index, such as "
            "https://download.pytorch.org/whl/cpu"
        ) from error


def load_plugin(group: str, name: str, setting: str, otherwise: str = "") -> Any:
    """What the entry point ``name`` of a group stands for, or the bundled one of this name; without a name the only
    one, installed ones first. InputError, which names the setting, for one that is not installed or cannot be imported.
    otherwise: what can be done instead."""
    found, along = installed(group), BUILT_IN.get(group, {})
    usual = [*found] or [*along]
    if not name and len(usual) == 1:
        (name,) = usual
    if name not in found and name not in along:
        names = sorted({*found, *along})
        known = f"there are {', '.join(names)}{nearest(name, names)}" if names else "none is installed"
        given, which = (repr(name), f"with {name}") if name else ("not set", "that has one")
        instead = f", or {otherwise}" if otherwise else ""
        rule = f"must name a plug-in, an entry point of the group {group} of a package, of which {known}"
        raise InputError(Fault(setting, f"is {given}, but {rule}: install a package {which}{instead}"))
    plugin = found.get(name) or EntryPoint(name, along[name], group)
    try:
        return loaded(plugin) if name in found else loaded(plugin)()
    except InputError as error:
        raise InputError(Fault(setting, f"is {name!r}, but {error}")) from error
