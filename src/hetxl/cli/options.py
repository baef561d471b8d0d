"""Flags made of the options of a training, so that each is written once."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from hetxl.training.config import TrainConfig, read_toml
from hetxl.training.presets import preset_for

CONFIG_HELP = "TOML file with options; flags go before it."


def config_flags(
    without: tuple[str, ...] = (), kind: type = TrainConfig
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every option of a configuration, and `--config FILE`.

    The command is called with its own parameters and `given`, the options that were given: those of the file, and over
    them the flags.

    Args:
        without: options that are no flags of this command.
        kind: the configuration, a dataclass whose fields are made by `hetxl.training.config.option`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        fields = [field for field in dataclasses.fields(kind) if field.name not in without]
        own = [p for p in inspect.signature(function).parameters.values() if p.name != "given"]
        flags = [_flag(field, kind) for field in fields]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Path | None, typer.Option(help=CONFIG_HELP, show_default=False)],
        )

        @wraps(function)
        def command(**values: Any) -> None:
            given = {field.name: values.pop(field.name) for field in fields}
            file = values.pop("config")
            function(**values, given=(file, {name: value for name, value in given.items() if value is not None}))

        parameters = [*own, config, *flags]
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        del command.__wrapped__  # typer would look behind it
        return command

    return decorate


Given = tuple[Path | None, dict[str, Any]]
"""The file of options, and the flags that were given."""


def resolve(
    given: Given,
    defaults: Mapping[str, Any] | None = None,
    *,
    instead: Mapping[str, str] | None = None,
    **positional: Any,
) -> TrainConfig:
    """The configuration: defaults, then the file, then arguments and flags.

    Args:
        given: the file and the flags.
        defaults: beneath both.
        instead: options that the command sets by itself, and by which flag; a file must not have them.
        positional: arguments, over the file.
    """
    file, flags = given
    values = dict(defaults or {})
    if file is not None:
        written = read_toml(file)
        for name, flag in (instead or {}).items():
            if name in written:
                raise ValueError(
                    f"--config {file}: {name} is chosen by {flag} in this command; take it out of the file"
                )
        if "epochs" in written and "steps" not in written:
            values.pop("steps", None)  # those of the defaults, which would go before it
        values |= written
    values |= {name: value for name, value in positional.items() if value is not None}
    values |= flags
    if "steps" in flags and "epochs" in flags:
        raise ValueError("--steps and --epochs exclude each other; give one")
    if "epochs" in flags:
        values.pop("steps", None)
    return TrainConfig(**values)


def resolve_preset(given: Given, data: str | None, *, instead: Mapping[str, str]) -> TrainConfig:
    """As `resolve`, with the preset of built-in data beneath: of that given, else of the file's, else of pycode.

    Args:
        given: the file and the flags.
        data: the argument.
        instead: options that the command sets by itself, and by which flag; a file must not have them.
    """
    file = given[0]
    if data is None:
        data = "pycode" if file is None else read_toml(file).get("data", "pycode")
    return resolve(given, preset_for(str(data)), instead=instead, data=data)  # what is no string is told there


def _flag(field: dataclasses.Field, config: type) -> inspect.Parameter:
    hint = typing.get_type_hints(config)[field.name]
    kind = hint if not isinstance(hint, types.UnionType) else next(k for k in hint.__args__ if k is not type(None))
    text, choices = field.metadata["help"], field.metadata["choices"]
    if choices:
        text = f"{text.rstrip('.')}: {', '.join(choices)}."
    if field.default is not None and "[" not in text:
        default = str(field.default).lower() if kind is bool else field.default
        text = f"{text} [{default}]"
    name = "--" + field.name.replace("_", "-")
    declared = f"{name}/--no-{name[2:]}" if kind is bool else name
    also = field.metadata["also"]
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(declared, *also, help=text, show_default=False)],
    )
