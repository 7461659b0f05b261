"""Write the generated documentation: ``scripts/README.md``, and the table in ``diff_dalle/presets/README.md``."""

import argparse
import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmark
import demo
import help_without_torch  # noqa: F401
from drills.table import DrillConfig

from diff_dalle.checkpoints.kinds import TRAINING_COMMANDS
from diff_dalle.commands.cascade.importing import ImportConfig
from diff_dalle.commands.convert import ConvertConfig
from diff_dalle.commands.evaluate import EvaluateRun
from diff_dalle.commands.examples import examples_of
from diff_dalle.commands.flag_tables import Command, command_page
from diff_dalle.commands.gathering import AssembleConfig, ConsolidateConfig
from diff_dalle.commands.info import InfoConfig, preset_table
from diff_dalle.commands.merge_lora import MergeConfig
from diff_dalle.commands.prepare import COMMANDS as PREPARE
from diff_dalle.commands.replay_config import ReplayRun
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.serve import ServeRun
from diff_dalle.commands.share import COMMANDS as SHARE
from diff_dalle.commands.train_tokenizer import VocabularyConfig
from diff_dalle.commands.watch import WatchConfig
from diff_dalle.recipes.planning.cluster import PlanConfig

SCRIPTS = Path(__file__).parent
PRESETS = SCRIPTS.parent / "diff_dalle" / "presets" / "README.md"
TRAINING: dict[str, dict[str, Any]] = {}  # by script, and by kind where it trains several
for kind, each in TRAINING_COMMANDS.items():
    TRAINING.setdefault(Path(each.script).name, {})[f"kind: {kind}"] = each.config_class
CONFIGS: dict[str, Mapping[str, Any]] = {
    "demo.py": {"": demo.DemoConfig},
    "prepare_data.py": {name: subcommand.config for name, subcommand in PREPARE.items()},
    **{script: own if len(own) > 1 else {"": next(iter(own.values()))} for script, own in TRAINING.items()},
    "assemble_decoder.py": {"": AssembleConfig},
    "import_cascade.py": {"": ImportConfig},
    "consolidate.py": {"": ConsolidateConfig},
    "merge_lora.py": {"": MergeConfig},
    "convert.py": {"": ConvertConfig},
    "sample.py": {"": SampleRun},
    "serve.py": {"": ServeRun},
    "evaluate.py": {"": EvaluateRun},
    "share.py": {name: subcommand.config for name, subcommand in SHARE.items()},
    "watch.py": {"": WatchConfig},
    "info.py": {"": InfoConfig, "plan": PlanConfig},
    "replay.py": {"": ReplayRun},
    "benchmark.py": {"": benchmark.BenchmarkRun},
    "drill.py": {"": DrillConfig},
    "train_tokenizer.py": {"": VocabularyConfig},
}


def command(script: str) -> Command:
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    return Command(script, ast.get_docstring(ast.parse(text)) or "", examples_of(script), CONFIGS[script])


def pages() -> dict[Path, str]:
    """The content of each file that is generated or has a generated part."""
    pattern = "(?s)(<!-- presets -->).*(<!-- /presets -->)"
    presets = re.sub(pattern, lambda found: f"{found[1]}\n\n{preset_table()}\n{found[2]}", PRESETS.read_text("utf-8"))
    return {SCRIPTS / "README.md": command_page([command(script) for script in CONFIGS]), PRESETS: presets}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
