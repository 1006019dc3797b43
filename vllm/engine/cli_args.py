"""Command-line flags made from the fields of `EngineArgs`: one a field, dashes for underscores."""

import argparse
import dataclasses
import json
import types
import typing
from collections.abc import Collection
from typing import Any

from vllm.exceptions import VLLMValidationError


def _first_plain_type(annotation: Any) -> type:
    """Return the first of bool, int, float, dict and str that `annotation` allows; str for anything else."""
    choices = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    origins = [typing.get_origin(choice) or choice for choice in choices]
    for plain in (bool, dict, int, float):
        if plain in origins and str not in origins:
            return plain
    return str


def read_json_object(text: str) -> dict[str, Any]:
    """Return the value of a flag that takes a JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


read_json_object.__name__ = "JSON object"  # argparse shows it in its error line


def add_cli_args(
    kind: type, parser: argparse.ArgumentParser, leave_out: Collection[str] = ()
) -> argparse.ArgumentParser:
    """Give `parser` a flag for each field of the dataclass `kind`; fields without a help text stay out of --help.

    A flag that is not given is absent from the namespace, so that the field keeps its own default.
    """
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in leave_out:
            continue
        flag = "--" + field.name.replace("_", "-")
        help_text = field.metadata.get("help")
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "dest": field.name, "help": argparse.SUPPRESS}
        if help_text:
            shown = "" if field.default in (None, "") else f" (default: {field.default})"
            options["help"] = (help_text + shown).replace("%", "%%")
        plain = _first_plain_type(hints[field.name])
        if plain is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
            continue
        options["type"] = read_json_object if plain is dict else plain
        if field.metadata.get("choices"):
            options["choices"] = field.metadata["choices"]
        else:
            options["metavar"] = plain.__name__.upper()
        group.add_argument(flag, **options)
    return parser


def check_at_least(args: argparse.Namespace, **lowest: int) -> None:
    """Raise for a flag below its lowest value.

    Raises:
        VLLMValidationError: it names the flag.
    """
    for name, low in lowest.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise VLLMValidationError(f"--{name.replace('_', '-')} must be at least {low}; got {value}")


def with_dashes(argv: list[str]) -> list[str]:
    """Return `argv` with the underscores of its flags' names as dashes: both spellings are read."""
    dashed: list[str] = []
    for place, argument in enumerate(argv):
        if argument == "--":
            return dashed + argv[place:]
        name, equals, value = argument.partition("=")
        dashed.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return dashed
