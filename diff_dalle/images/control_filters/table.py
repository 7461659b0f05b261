"""The control filters by name, and how settings name one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...config import Fault, InputError, Registry, faults_of, from_dict, option, settings
from ...config.bounds import MAX_WIDTH
from .canny import CannyFilter
from .contract import ControlFilter, Materials, PictureFilter, PixelatedFilter, ReadyFilter, SemanticPixelatedFilter
from .identity import IdentityFilter
from .inpainting import InpaintFilter

GROUP = "diff_dalle.control_filters"
FILTERS: Registry[type[ControlFilter]] = Registry(
    GROUP,
    {
        "canny": CannyFilter,
        "sr": PixelatedFilter,
        "semantic_sr": SemanticPixelatedFilter,
        "inpaint": InpaintFilter,
        "identity": IdentityFilter,
        "picture": PictureFilter,
        "ready": ReadyFilter,
    },
)
#: What published configs call them.
PUBLISHED = {
    "CannyFilter": "canny",
    "SRFilter": "sr",
    "SREffnetFilter": "semantic_sr",
    "InpaintFilter": "inpaint",
    "IdentityFilter": "identity",
    "BaseFilter": "picture",
}
#: Filters of published configs that are not part of this library, and what they find.
MISSING = {
    "PidiFilter": "soft edges by PiDiNet (Su et al. 2021)",
    "QRFilter": "blobs of dark, middle and bright places",
}


@settings
class ControlConfig:
    """Control"""

    controlnet_filter: str = option(
        "",
        f"filter that extracts the control: {', '.join(FILTERS)}, or one of your own (--import); also by the "
        "names of published configs, such as CannyFilter",
        required=True,
    )
    controlnet_filter_params: str = option(
        "{}", "its parameters, a mapping or its JSON text, such as {resize: 224}", nested=True
    )
    control_channels: int = option(0, "channels of the control, recorded by training", most=MAX_WIDTH)

    @property
    def filter_class(self) -> type[ControlFilter]:
        """InputError for a filter that does not exist; a plug-in is imported."""
        name = PUBLISHED.get(self.controlnet_filter, self.controlnet_filter)
        if name in FILTERS:
            try:
                return FILTERS[name]
            except InputError as error:
                raise InputError(Fault("controlnet_filter", f"is {name!r}, but {error}")) from error
        if name in MISSING:
            rule = (
                f"must be a filter of this library, which {MISSING[name]} are not: use canny, put such controls into "
                f"the shards (ready), or install a package whose entry point {name} of the group {GROUP} is a filter"
            )
            raise InputError(Fault("controlnet_filter", rule, name))
        raise InputError(
            Fault("controlnet_filter", f"{FILTERS.rule(name)}; such controls may also be in the shards (ready)", name)
        )

    @property
    def given_params(self) -> Mapping[str, Any]:
        """The parameters that are given. InputError for no mapping."""
        setting = "controlnet_filter_params"
        try:
            given = json.loads(self.controlnet_filter_params or "{}")
        except ValueError as error:
            raise InputError(Fault.of(self, setting, f"it is no JSON text: {error}")) from None
        if not isinstance(given, Mapping):
            raise InputError(Fault.of(self, setting, "must be a mapping"))
        return given

    def params_of(self, kind: type[ControlFilter]) -> Any:
        """The parameters, as the filter's dataclass. InputError for others than it has."""
        return from_dict(kind.params, self.given_params, "controlnet_filter_params")

    @property
    def note(self) -> str:
        """What the filter has to say about its parameters; empty = nothing."""
        kind = self.filter_class
        return kind.note_on(self.params_of(kind))

    @property
    def own_params(self) -> dict[str, Any]:
        """The parameters that the published filter has otherwise, without a place in its files."""
        kind = self.filter_class
        params = self.params_of(kind)
        found = {name: getattr(params, name) for name in kind.published}
        return {name: value for name, value in found.items() if value != kind.published[name]}

    def as_published(self) -> ControlConfig:
        """With the parameters of the published filter that its files do not give."""
        return self._with(self.filter_class.published)

    def continuing(self, start: ControlConfig) -> ControlConfig:
        """Of a training that goes on from a ControlNet with the controls of ``start``: with what that one's filter has
        of a published one, unless this says it itself."""
        kind = self.filter_class
        if start.filter_class is not kind:
            return self
        own, others = self.params_of(kind), start.params_of(kind)
        found = {name: getattr(others, name) for name in kind.published}
        return self._with({name: value for name, value in found.items() if value != getattr(own, name)})

    def _with(self, more: Mapping[str, Any]) -> ControlConfig:
        """With more parameters, of which those that are given stay."""
        if not more.keys() - self.given_params.keys():
            return self
        return replace(self, controlnet_filter_params=json.dumps({**self.given_params, **more, **self.given_params}))

    @property
    def channels(self) -> int:
        """Of the control: as recorded, else the filter's."""
        return self.control_channels or self.create().channels

    def check(self) -> None:
        """InputError for a filter that does not exist, or parameters that it does not have, about settings of the
        config that has these as ``control``."""
        wrong = faults_of(lambda: self.params_of(self.filter_class))
        InputError.check(fault.below(("control",)) for fault in wrong)

    def create(self, materials: Materials | None = None) -> ControlFilter:
        """The filter. InputError for what it lacks."""
        kind = self.filter_class
        return kind(self.params_of(kind), materials or Materials())
