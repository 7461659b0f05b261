"""The card of a LoRA: what it changes, how it is used, and what its file and its report record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...checkpoints.lora_file import Lora
from ...config import shown
from ...errors import quantity
from ...evaluation.report import markdown_table
from .card import KINDS, UNKNOWN, CardTexts, front_matter
from .score_tables import score_tables
from .usage import lora_usage


def lora_card(
    lora: Lora, texts: CardTexts, scores: Mapping[str, Any] | None = None, samples: Sequence[tuple[str, str]] = ()
) -> str:
    """A LoRA's card in Markdown. Arguments as for ``model_card``."""
    about = lora.about
    what, does = KINDS.get(about.kind, ("generator", "text-to-image"))
    of = f"{what}, {about.trainee}" if about.trainee else what
    modules, count = {name.rpartition(".")[0] for name in lora.pairs}, sum(t.numel() for t in lora.tensors.values())
    command, code = lora_usage(about.kind, texts.location, texts.prompt)
    parts = [
        front_matter(does, texts, "lora"),
        f"# {texts.title}",
        texts.description,
        f"* `lora.safetensors`: LoRA of a {of}, rank {about.rank}, {quantity(len(modules), 'module')}, "
        f"{quantity(count, 'parameter')}.",
        *(f"![{title}]({name})" for title, name in samples),
        "## Use",
        f"```bash\n{command}\n```\n\n```python\nimport diff_dalle\n\n{code}\n```",
        f"It was trained for the weights `{about.base}`; over others it is refused, unless they are accepted "
        "(`--accept_changed_base True`).",
    ]
    if tables := list(score_tables(scores or {})):
        parts += ["## Scores", "In parentheses: 95 % intervals.", *tables]
    limits = "\n".join(filter(None, [texts.limits, "* Prompts and images are not filtered."]))
    parts += ["## Limits", limits, "## License", texts.license or f"The license is {UNKNOWN}."]
    rows = [[name, shown(getattr(about, name))] for name in ("rank", "alpha", "module_filters", "train_tokens")]
    parts += ["## Hyperparameters", markdown_table(["setting", "value"], rows)]
    return "\n\n".join(filter(None, parts)) + "\n"
