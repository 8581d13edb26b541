"""What the words of the command line mean: meshes, pins, amounts, argument numbers, compiler options."""

from __future__ import annotations

import argparse
import ast
import contextlib
import re
from typing import Any

from jax.sharding import PartitionSpec

from shardplan.units import parse_bytes


class UsageError(Exception):
    """An error of the user, with all there is to say."""


def positive(text: str) -> float:
    """A number above 0, of seconds or of a part."""
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0, such as 0.1")


def amount(text: str) -> float:
    """Bytes of "80GB"."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def numbers(text: str) -> tuple[int, ...]:
    """(0, 1) of "0,1"."""
    try:
        return tuple(int(n) for n in text.split(",") if n.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of argument numbers, such as 0,1") from None


def compiler_options(text: str) -> tuple[Any]:
    """(what `auto(compiler_options=...)` takes,): a tuple, so that none given is not None given."""
    if text in ("auto", "none"):
        return (None if text == "none" else text,)
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and equals for name, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is none of auto, none and NAME=VALUE,...")

    def value(word: str) -> bool | int | float | str:
        for read in ({"true": True, "false": False}.__getitem__, int, float):
            with contextlib.suppress(KeyError, ValueError):
                return read(word)
        return word

    return ({name.strip(): value(word.strip()) for name, _, word in pairs},)


def parse_mesh(text: str) -> dict[str, int]:
    """{"data": 2, "model": 4} of "data=2,model=4"."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh {text}: {part!r} is no axis with a size.\n  way out: --mesh data=2,model=4")
        if name in axes:
            raise UsageError(f"--mesh {text}: axis {name!r} stands twice.\n  way out: a name of its own for each axis")
        axes[name] = int(size)
    return axes


def parse_pin(text: str) -> tuple[str, Any]:
    """("params/**/kernel", P(None, "model")) of "params/**/kernel=None,model", or of the spec as plans print it, "P(None, 'model')"."""
    path, equals, spec = text.rpartition("=")
    if not equals or not path.strip():
        raise UsageError(f"--pin {text}: has no path and spec.\n  way out: --pin 'params/**/kernel=None,model'")

    if printed := re.fullmatch(r"\s*(?:P|PartitionSpec)\((.*)\)\s*", spec):
        with contextlib.suppress(ValueError, SyntaxError):
            return path.strip(), PartitionSpec(*ast.literal_eval(f"({printed[1]},)" if printed[1].strip(", ") else "()"))

    def entry(word: str):
        if word in ("None", "-", ""):
            return None
        return PartitionSpec.UNCONSTRAINED if word == "*" else tuple(word.split("+")) if "+" in word else word

    words = [w.strip() for w in spec.split(",")] if spec.strip() else []
    return path.strip(), PartitionSpec(*map(entry, words))
