"""Examples of every command: what ``--help`` begins with and ``scripts/README.md`` lists."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

PROGRAM = "diff-dalle"  # the console command
_PACKAGE = Path(__file__).resolve().parent.parent
INSTALLED = (_PACKAGE / "scripts").is_dir()  # from a wheel, which brings the scripts; else they are a checkout's
SCRIPTS = (_PACKAGE if INSTALLED else _PACKAGE.parent) / "scripts"
FILE = Path(__file__).with_name("examples.txt")  # one command a line
SHOWN = 2  # by ``--help``
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


def examples_of(script: str, subcommand: str = "") -> list[str]:
    """The examples of a script, of one of its subcommands if that is given; none for a name without any.

    script: its file name, with or without its ending, or that of the console command and its own name.
    """
    start = f"scripts/{Path(script).stem.removeprefix(PROGRAM).strip()}." + (f"py {subcommand} " if subcommand else "")
    return [line for line in FILE.read_text(encoding="utf-8").splitlines() if start in line]


def usage(script: str, subcommand: str = "") -> str:
    """The usage of a script, followed by its first examples, for ``argparse``.

    subcommand: or what may follow in its place, in capitals.
    """
    words = Path(script).name, subcommand, "[flags]"
    lines = [" ".join(word for word in words if word)]  # a list of all flags would fill a screen
    if found := examples_of(script, "" if subcommand.isupper() else subcommand)[:SHOWN]:
        as_called = in_package if script.startswith(PROGRAM) else str
        lines += ["", "examples:", *(f"  {as_called(line)}" for line in found)]
    return "\n".join(lines).replace("%", "%%")


def in_package(line: str) -> str:
    """A command line of a checkout as one that an installed package takes from any folder."""
    line = re.sub(r"torchrun (.*?)scripts/(\w+)\.py", r"torchrun \1-m diff_dalle \2", line)
    return re.sub(r"(?:python|bash) scripts/(\w+)\.(?:py|sh)", rf"{PROGRAM} \1", line)


def scripts_in_order() -> list[str]:
    """The names of the scripts that have examples, in the order of these: from data to training to samples."""
    found = re.findall(r"scripts/(\w+)\.", FILE.read_text(encoding="utf-8"))
    return list(dict.fromkeys(found))


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
