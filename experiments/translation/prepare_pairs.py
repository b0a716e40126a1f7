"""Write the vocabulary and the tokens of all sentence pairs, 12 MB, so that the experiments need no tokenizer.

python -m experiments.translation.prepare_pairs --data FOLDER --cache runs/experiments
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.translation.parts.corpora import FILES, Corpora
from harness.command import say


def main(argv: Sequence[str]) -> int:
    """Learn the vocabulary and write the tokens of all files."""
    command = "python -m experiments.translation.prepare_pairs"
    parser = argparse.ArgumentParser(prog=command, description="Prepare sentence pairs.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the files")
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="where tokens are kept")
    settings = parser.parse_args(argv)
    corpora = Corpora(settings.data, settings.cache, small=False)
    for name in FILES:
        pairs = corpora.pairs(name)
        tokens = int(pairs.source_lengths.sum() + pairs.target_lengths.sum())
        say(f"{name:14} {len(pairs):8,} pairs, {tokens / len(pairs) / 2:.1f} tokens a sentence")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
