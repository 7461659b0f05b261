"""How many hostile files are drilled, by the parsers that read them, and within which limits."""

from __future__ import annotations

LIMIT_SECONDS = 2.0  # of computing: other processes may be busy too
LIMIT_BYTES = 1 << 30  # beside what the process has when it starts to read
REPORT = "report.json"

# Cases by the names of ``parsers.PARSERS``.
CASES = {
    "tars": 24_000,
    "filters": 1_000,
    "captions": 20_000,
    "images": 18_000,
    "embeddings": 14_000,
    "vocabularies": 6_000,
    "masks": 5_000,
    "index tables": 4_000,
    "index summaries": 2_000,
    "checkpoints": 2_000,
    "weights": 2_000,
    "LoRAs": 4_000,
    "ControlNets": 2_000,
    "run.json": 1_500,
    "configurations": 1_500,
    "decoder files": 1_000,
    "cascade files": 1_000,
    "structures (hypothesis)": 1_000,
}
