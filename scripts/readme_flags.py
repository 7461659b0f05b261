"""Write the generated documentation: ``scripts/README.md``, and the table in ``diff_dalle/presets/README.md``."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import benchmark
import demo

from diff_dalle.commands.evaluate import EvaluateRun
from diff_dalle.commands.flag_tables import Command, command_page
from diff_dalle.commands.info import InfoConfig, preset_table
from diff_dalle.commands.prepare import COMMANDS as PREPARE
from diff_dalle.commands.replay import ReplayRun
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.train_classifier import ClassifierRun
from diff_dalle.commands.train_generator import GeneratorRun
from diff_dalle.drill.table import DrillConfig
from diff_dalle.text.bpe_training import VocabularyConfig

SCRIPTS = Path(__file__).parent
PRESETS = SCRIPTS.parent / "diff_dalle" / "presets" / "README.md"
CONFIGS: dict[str, Mapping[str, Any]] = {
    "demo.py": {"": demo.DemoConfig},
    "prepare_data.py": {name: subcommand.config for name, subcommand in PREPARE.items()},
    "train_generator.py": {"": GeneratorRun},
    "train_classifier.py": {"": ClassifierRun},
    "sample.py": {"": SampleRun},
    "evaluate.py": {"": EvaluateRun},
    "info.py": {"": InfoConfig},
    "replay.py": {"": ReplayRun},
    "benchmark.py": {"": benchmark.BenchmarkRun},
    "drill.py": {"": DrillConfig},
    "train_tokenizer.py": {"": VocabularyConfig},
}
EXAMPLES = """
bash scripts/demo.sh
bash scripts/demo.sh --quick True --demo_dir runs/quick
python scripts/prepare_data.py shapes --out_dir data/shapes --image_size 64
python scripts/prepare_data.py folder --source path/to/photos --out_dir path/to/shards
mpiexec -n 8 python scripts/prepare_data.py embeddings --data_dir path/to/shards --clip_path clip.pt --out_dir embed
python scripts/train_generator.py --preset generator_64_small --data_dir path/to/shards --logdir runs/64
mpiexec -n 8 python scripts/train_generator.py --preset upsampler_256 --data_dir path/to/shards --logdir runs/256
python scripts/train_classifier.py --preset classifier_64_small --data_dir path/to/shards --logdir runs/clip
python scripts/train_classifier.py --config runs/clip.yaml --set optim.lr=1e-4
python scripts/sample.py --model_path 64.pt --upsampler_paths 256.pt,1024.pt --prompts "a lighthouse in the evening"
python scripts/sample.py --model_path ema.pt --prompts_file prompts.txt --timestep_respacing 250 --sampler ancestral
python scripts/evaluate.py --model_path ema.pt --shapes_dir data/shapes --report_dir runs/report
python scripts/evaluate.py --model_path ema.pt --classifier_path clip.pt --data_dir path/to/val_shards
python scripts/info.py --model_path ema.pt
python scripts/info.py --preset generator_64
python scripts/replay.py --logdir runs/64
python scripts/replay.py --logdir runs/64 --step 1200 --device cpu
python scripts/benchmark.py
python scripts/benchmark.py --benchmarks train_step
python scripts/drill.py --quick True
python scripts/drill.py --faults ends,ranks --kinds generator --out_dir runs/drill
python scripts/train_tokenizer.py --out vocabulary.txt
python scripts/train_tokenizer.py --wordnet_dir path/to/wordnet --num_merges 8192 --out vocabulary.txt
"""


def command(script: str) -> Command:
    text = (SCRIPTS / script).read_text(encoding="utf-8")
    examples = [line for line in EXAMPLES.splitlines() if f"scripts/{script.removesuffix('.py')}." in line]
    return Command(script, ast.get_docstring(ast.parse(text)) or "", examples, CONFIGS[script])


def pages() -> dict[Path, str]:
    """The content of each file that is generated or has a generated part."""
    pattern = "(?s)(<!-- presets -->).*(<!-- /presets -->)"
    presets = re.sub(pattern, lambda found: f"{found[1]}\n\n{preset_table()}\n{found[2]}", PRESETS.read_text("utf-8"))
    return {SCRIPTS / "README.md": command_page([command(script) for script in CONFIGS]), PRESETS: presets}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
