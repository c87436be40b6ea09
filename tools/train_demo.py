"""Build the corpus, train, export and measure the bundled demo model.

    python tools/train_demo.py corpus   --work DIR    fetch the text, train the tokenizer
    python tools/train_demo.py train    --work DIR --minutes 100
    python tools/train_demo.py export   --work DIR --out DIR
    python tools/train_demo.py evaluate --work DIR --out evaluation.json
    python tools/train_demo.py bundle   --work DIR    convert, measure, put into the package

Needs torch, numpy, tokenizers and safetensors (the extra `oracle`), and for the corpus the
clients `apt-get`, `dpkg`, `npm` and `pip`. `bundle` exports and evaluates first where that is
older than the checkpoint, and needs Colibri with native kernels.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Run one of the five commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    default = Path("~/.cache/colibri-demo").expanduser()
    for name in ("corpus", "train", "export", "evaluate", "bundle"):
        command = commands.add_parser(name)
        command.add_argument("--work", type=Path, default=default, help="working folder")
        if name == "train":
            command.add_argument("--minutes", type=float, default=0.0, help="time budget")
            command.add_argument("--steps", type=int, default=3000, help="step budget")
            command.add_argument("--workers", type=int, default=2, help="processes")
            command.add_argument("--fresh", action="store_true", help="ignore the checkpoint")
        if name in ("export", "evaluate"):
            command.add_argument("--out", type=Path, required=True, help="folder or file to write")
        if name == "export":
            kinds = ("float32", "bfloat16")
            command.add_argument("--dtype", choices=kinds, default="float32")
        if name == "bundle":
            command.add_argument("--out", type=Path, help="default: src/colibri/bundled")
        if name in ("evaluate", "bundle"):
            command.add_argument("--windows", type=int, default=64, help="stretches a domain")
            command.add_argument("--samples", type=int, default=56, help="continuations")
    options = parser.parse_args()
    if options.command == "corpus":
        from tools.demo.corpus import build

        build(options.work)
    elif options.command == "train":
        from tools.demo.train import train

        train(options.work, options.minutes, options.steps, options.workers, options.fresh)
    elif options.command == "export":
        from tools.demo.export import export

        export(options.work, options.out, options.dtype)
    elif options.command == "bundle":
        from tools.demo.bundle import BUNDLED, bundle

        bundle(options.work, options.out or BUNDLED, options.windows, options.samples)
    else:
        from tools.demo.evaluate import evaluate

        evaluate(options.work, options.out, options.windows, options.samples)


if __name__ == "__main__":
    main()
