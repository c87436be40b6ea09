#!/usr/bin/env python3
"""Write a seeded random checkpoint of any family, shape and format, with a byte-level tokenizer.

    python tools/make_checkpoint.py DIR --family olmoe [--shape NAME] [--format int4-g64] [--seed 0]
    python tools/make_checkpoint.py DIR --like gpt-oss-120b [--layers 4] [--experts 32]

Coded formats become a container, float formats a Hugging Face checkpoint. A shape is a size for any
family. `--like` takes family, sizes and storage of a published model: fp8 with block scales, mxfp4
or packed int4, in the files' own spelling; `--layers` and `--experts` make it smaller.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from colibri.checkpoint.generate import SPELLINGS
from colibri.cli.failures import OS_EXIT_CODE
from colibri.errors import ColibriError
from colibri.formats import FORMATS
from colibri.models.generate import generate, shape_config, shape_names
from colibri.models.published import published_model, published_models
from colibri.models.registry import get_family
from colibri.units import format_bytes, format_seconds

_FAMILY_OF_SHAPE = {"olmoe-7b": "olmoe", "qwen3-30b": "qwen3_moe", "glm-5.2": "qwen3_moe"}
_DEFAULT_FAMILY = "qwen3_moe"
_EVERY_S = 0.25


class _Ticker:
    """Shows progress on a terminal, at most four times a second."""

    def __init__(self) -> None:
        self.began = self.shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty():
            return
        if now - self.shown >= _EVERY_S or done == total:
            self.shown = now
            rate = format_bytes(done / max(now - self.began, 1e-9))
            text = f"{format_bytes(done)} of {format_bytes(total)}, {rate}/s"
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def _line_end() -> str:
    """What ends the line of the progress, where there is one."""
    return "\n" if sys.stderr.isatty() else ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes: new or empty")
    parser.add_argument("--family", help="default: that of the shape, else " + _DEFAULT_FAMILY)
    parser.add_argument(
        "--shape",
        default="demo",
        choices=shape_names(),
        help="sizes of the model; default: demo. glm-5.2 is a model of that size of the default "
        "family, not of its own",
    )
    parser.add_argument(
        "--like", choices=published_models(), help="a published model, in its own storage"
    )
    parser.add_argument("--experts", type=int, help="of a layer, instead of the model's own number")
    parser.add_argument("--format", default="int4-g64", choices=FORMATS, help="of the experts")
    parser.add_argument("--dense", default="bf16", choices=FORMATS, help="of dense matrices")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; default: 0")
    parser.add_argument(
        "--spelling", choices=SPELLINGS, help="of float experts; default: as published"
    )
    parser.add_argument("--shards", type=int, default=1, help="files of a float checkpoint")
    return parser.parse_args()


def _shaped(args: argparse.Namespace, ticker: _Ticker) -> str:
    """A shape filled by a model of any family; returns what was made."""
    name = args.family or _FAMILY_OF_SHAPE.get(args.shape, _DEFAULT_FAMILY)
    generate(
        args.directory,
        shape_config(get_family(name), args.shape, args.layers),
        experts=args.format,
        dense=args.dense,
        seed=args.seed,
        spelling=args.spelling,
        shards=args.shards,
        progress=ticker,
    )
    return f"{name}, {args.shape}, {args.format}"


def _like(args: argparse.Namespace, ticker: _Ticker) -> str:
    """A checkpoint like a published one; returns what was made."""
    published = published_model(args.like)
    generate(
        args.directory,
        published.sized(args.layers, args.experts),
        experts=published.experts,
        dense=published.dense,
        published=True,
        seed=args.seed,
        shards=args.shards,
        progress=ticker,
    )
    return f"{args.like}, {published.experts}, dense {published.dense}"


def main() -> int:
    """Run the command; returns its exit code."""
    args = _arguments()
    ticker = _Ticker()
    try:
        what = _like(args, ticker) if args.like else _shaped(args, ticker)
    except ColibriError as error:
        print(f"{_line_end()}{error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{_line_end()}{error}", file=sys.stderr)
        return OS_EXIT_CODE
    elapsed = format_seconds(time.monotonic() - ticker.began)
    print(f"{_line_end()}{args.directory}: {what}, {elapsed}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
