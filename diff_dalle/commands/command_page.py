"""The commands in Markdown: what ``scripts/README.md`` holds."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .examples import SCRIPTS, examples_of

INTRODUCTION = """# Commands

Settings are flags. Later sources win: default < `--preset NAME` < `--config FILE` < flag or `--set PATH=VALUE`.

* `--preset NAME` takes the settings of a [preset](../diff_dalle/presets/README.md), `--config FILE` those of a YAML or
  JSON file, with the keys grouped by section or not.
* `--dry_run` prints the resolved settings as such a file and exits. `--help` shows examples and the
  settings that people set, `--help_all` all.
* `--set optim.lr=1e-4` sets any setting by its path in that file, also one without a flag, such as those in lists of
  sections. It may be repeated.
* `--import MODULE` imports a module with losses, samplers and other [parts of your
  own](../diff_dalle/README.md#your-own-parts).
* Lists are separated by commas; `none` is the empty list or text. Booleans take `True` or `False`; the flag alone
  means `True`.
* `mpiexec -n 8 python`, `torchrun --nproc_per_node 8` and `srun python` run training, sampling and evaluation in
  several processes, one per GPU ([Slurm](../diff_dalle/tasks/README.md#many-processes)).

`diff-dalle`, or `python -m diff_dalle`, lists the commands and runs them from any folder: `diff-dalle sample` is
`python scripts/sample.py`.
With the extra `completion` and `activate-global-python-argcomplete`, the shell completes its commands and flags.
[`tour.ipynb`](tour.ipynb) is a tour of the library as a notebook.
`bash scripts/test.sh` runs the tests, `bash scripts/gpu_check.sh FOLDER` what nine minutes of a GPU are for.
`python scripts/readme_flags.py` writes this file and the table of presets."""


def description_of(script: str) -> str:
    """The docstring of a script, by its name."""
    return ast.get_docstring(ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8"))) or ""


def command_page(scripts: Sequence[str]) -> str:
    """Every command with its description and examples."""
    contents = [f"* [`{script}.py`](#{script}py)" for script in scripts]
    parts = [INTRODUCTION, "\n".join(contents)]
    for script in scripts:
        examples = "\n".join(examples_of(script))
        parts += [f"## `{script}.py`", description_of(script), f"```bash\n{examples}\n```"]
    return "\n\n".join(parts) + "\n"
