"""Assemble the noisy corpus: write its tokens and print its composition.

python -m experiments.translation.prepare_noisy_corpus --data FOLDER --cache runs/experiments
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.translation.parts.corpora import Corpora
from experiments.translation.parts.noisy_corpus import NoisyCorpus
from harness.command import say


def main(argv: Sequence[str]) -> int:
    """Assemble the corpus and write its tokens."""
    command = "python -m experiments.translation.prepare_noisy_corpus"
    parser = argparse.ArgumentParser(prog=command, description="Prepare the noisy corpus.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the files")
    parser.add_argument("--cache", type=Path, default=Path("runs/experiments"), help="where tokens are kept")
    settings = parser.parse_args(argv)
    corpus, _ = NoisyCorpus.tokenised(Corpora(settings.data, settings.cache, small=False))
    for kind, number in corpus.counts().items():
        say(f"{kind:18} {number:8,} pairs")
    say(f"{'all':18} {len(corpus):8,} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
