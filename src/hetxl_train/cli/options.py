"""Generate flags from the options of a configuration, so that each option is written once."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hetxl_train.config import Options, TrainConfig, option_types
from hetxl_train.presets import preset_for

Config = TypeVar("Config", bound=Options)
Settings = tuple[Path | None, dict[str, Any]]
"""The TOML file of options, and the flags of the command line."""


def config_flags(
    without: tuple[str, ...] = (), kind: type[Options] = TrainConfig
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for every option of a configuration, and `--config FILE`.

    The command receives its own parameters and `settings`: the file and the flags that were set. Options in
    `without` get no flag.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        fields = [field for field in dataclasses.fields(kind) if field.name not in without]
        own = [p for p in inspect.signature(function).parameters.values() if p.name != "settings"]
        file_option = typer.Option(help="TOML file of options; flags override it.", show_default=False)
        config = _parameter("config", Annotated[Path | None, file_option])

        @wraps(function)
        def command(**values: Any) -> None:
            flags = {field.name: values.pop(field.name) for field in fields}
            file = values.pop("config")
            function(**values, settings=(file, {name: value for name, value in flags.items() if value is not None}))

        parameters = [*own, config, *(_flag(field, kind) for field in fields)]
        command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        del command.__wrapped__  # typer would read the wrapped function's signature
        return command

    return decorate


def _flag(field: dataclasses.Field, kind: type[Options]) -> inspect.Parameter:
    value_type, _ = option_types(kind)[field.name]
    text, choices = field.metadata["help"], field.metadata["choices"]
    if not all(choice in text for choice in choices):
        text = f"{text.rstrip('.')} ({', '.join(choices)})."
    if field.default is not None and "[" not in text:
        default = str(field.default).lower() if value_type is bool else field.default
        text = f"{text} [{default}]"
    name = "--" + field.name.replace("_", "-")
    names = (f"{name}/--no-{name[2:]}" if value_type is bool else name, *field.metadata["also"])
    section = f"{kind.sections()[field.name].capitalize()} options"
    option = typer.Option(*names, help=text, show_default=False, rich_help_panel=section)
    return _parameter(field.name, Annotated[value_type | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def resolve(
    kind: type[Config],
    settings: Settings,
    defaults: Mapping[str, Any] | None = None,
    *,
    instead: Mapping[str, str] | None = None,
    **positional: Any,
) -> Config:
    """Return the configuration. Later sources override earlier ones: defaults, recipe, file, arguments and flags.

    `instead` maps the options that the command sets itself to the flags that set them; the file must not have them.
    """
    file, flags = settings
    values = dict(defaults or {})
    written = {} if file is None else kind.read_toml(file)
    if recipe := flags.get("recipe", written.get("recipe")):
        from hetxl_train.recipes import recipe_options

        values.pop("steps", None)
        values |= recipe_options(str(recipe), kind)
        for name in set(instead or {}) & set(values):
            values.pop(name)  # the command chooses these
    if file is not None:
        for name, flag in (instead or {}).items():
            if name in written:
                raise ValueError(f"--config {file}: {name} is set by {flag} in this command; remove it from the file")
        if "epochs" in written and "steps" not in written:
            values.pop("steps", None)  # the default number of steps would override it
        values |= written
    values |= {name: value for name, value in positional.items() if value is not None}
    values |= flags
    if "steps" in flags and "epochs" in flags:
        raise ValueError("--steps and --epochs exclude each other; give one")
    if "epochs" in flags:
        values.pop("steps", None)
    if "steps" in flags:
        values.pop("epochs", None)
    if values.get("start_from"):
        from hetxl_train.start_from import inherited  # imports torch, which reading options does not need

        values = inherited(str(values["start_from"])) | values
    return kind(**values)


def resolve_preset(settings: Settings, data: str | None, kind: type[Config], *, instead: Mapping[str, str]) -> Config:
    """Return the configuration; its defaults are the preset of its dataset: the argument, the file's, or pycode."""
    file = settings[0]
    if data is None:
        data = "pycode" if file is None else kind.read_toml(file).get("data", "pycode")
    # A value that is not a string raises an error there.
    return resolve(kind, settings, preset_for(str(data)), instead=instead, data=data)
