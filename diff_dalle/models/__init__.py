"""The networks, beside the dataclasses that configure them.

Called, as ``diff_dalle.models()``, the package lists the bundled models, as does
``diff_dalle.trained_models``: a function of this name would be hidden as soon as the package is imported.
"""

import sys
from types import ModuleType

import diff_dalle


class _Networks(ModuleType):
    def __call__(self):
        return diff_dalle.trained_models()


sys.modules[__name__].__class__ = _Networks
