"""Settings from TOML files and `--set a.b=c`, and back; every complaint names its setting and what was meant."""

import difflib
import os
import tomllib
import typing
import warnings
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from regard.config.run import Config
from regard.errors import ConfigError


def recipes() -> dict[str, Path]:
    """The built-in recipes: name -> file."""
    folder = Path(str(resources.files("regard"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


Warn = Callable[[str], None]
"""Where doubts are said: Python's warnings, unless somebody else wants to hear them."""


def read(name_or_path: str, changes: Iterable[str] = (), warn: Warn = warnings.warn) -> Config:
    """Read a recipe's name or a .toml file, apply `a.b=c` changes, check it, and make its paths absolute: those of a
    file begin at its folder, those of changes at the current one."""
    return resolve_paths(parse(find(name_or_path), changes, warn))


def find(name_or_path: str) -> Path:
    """The file of a recipe's name, or of a path that ends in .toml."""
    known = recipes()
    if name_or_path in known:
        return known[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        raise ConfigError(f"{path} is a directory, expected a .toml file or a recipe's name.")
    if path.exists() and path.suffix != ".toml":
        raise ConfigError(f"{path} is no .toml file. Data is named in one, as data.train (README, Your own data).")
    if path.exists():
        return path
    if path.suffix == ".toml":
        raise ConfigError(f"{path} does not exist. Give a .toml file, or a recipe: {', '.join(known)}.")
    raise ConfigError(f"unknown recipe {name_or_path}.{suggest(name_or_path, known)} See `regard recipes`.")


def parse(path: Path, changes: Iterable[str] = (), warn: Warn = warnings.warn) -> Config:
    """Read and check one TOML file; its paths are seen from its folder."""

    def place(name: str) -> str:
        return name if name.startswith(("$", "~")) else str(path.parent / name)

    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, and numbers that are too long
        raise ConfigError(f"{path} is not TOML: {error}.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    changes, before = list(changes), get_kinds(tree)
    tree = drop_leftovers(merge(map_paths(tree, place), changes), before, changes, warn)
    return validate(tree, f"{path} with --set" if changes else str(path))


def get_kinds(tree: dict[str, Any]) -> dict[str, str]:
    """The kinds of data and model, as far as a tree names them."""
    groups = {name: tree.get(name) for name in ("data", "model")}
    return {name: str(group.get("kind")) for name, group in groups.items() if isinstance(group, dict)}


def list_kinds(group: str) -> dict[str, type[BaseModel]]:
    """The settings of every kind of data or of model."""
    models = list(find_models(Config.model_fields[group].annotation))
    return {kind: one for one in models for kind in typing.get_args(one.model_fields["kind"].annotation)}


def drop_leftovers(tree: dict[str, Any], before: dict[str, str], changes: Iterable[str], warn: Warn) -> dict[str, Any]:
    """The same tree without settings that only other kinds of model or data have, or that the kind `before` the changes
    had in another form (a number of examples, not files): they are said. Settings that no kind has, or that a change
    gives, stay to be refused."""
    given = {change.partition("=")[0].strip() for change in changes}
    for group in ("data", "model"):
        kinds = list_kinds(group)
        settings = tree.get(group)
        if group in given or not isinstance(settings, dict) or (kind := str(settings.get("kind"))) not in kinds:
            continue
        old, own = kinds.get(before.get(group, ""), kinds[kind]).model_fields, kinds[kind].model_fields
        elsewhere = {name for model in kinds.values() for name in model.model_fields} - {*own}
        elsewhere |= {name for name in {*own} & {*old} - {"kind"} if own[name].annotation != old[name].annotation}
        if left := [name for name in settings if name in elsewhere and f"{group}.{name}" not in given]:
            tree[group] = {name: value for name, value in settings.items() if name not in left}
            warn(f"{group}.kind {kind!r} has no {', '.join(left)}: left out, they belong to another kind.")
    return tree


def change(config: Config, changes: Iterable[str]) -> Config:
    """The settings of a run with `a.b=c` changes; file names in them are made absolute."""
    changes = list(changes)
    before = config.model_dump(exclude_none=True)
    kinds = get_kinds(before)
    tree = drop_leftovers(merge(before, changes), kinds, changes, lambda text: None)
    files = [name for name, one in list_kinds("data").items() if "train" in one.model_fields]
    if (kind := get_kinds(tree).get("data", "")) != kinds["data"] and kind in files:
        tree["data"].setdefault("train", ())  # other files to evaluate on: none to learn from are needed
    made = validate(tree, "--set")
    return resolve_paths(made) if changes else made


def merge(tree: dict[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """Apply changes of the form `a.b=c`, whose values are TOML or plain text, to a tree of settings."""
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"--set {change} is not of the form name=value, as in --set train.steps=200.")
        try:
            parsed = tomllib.loads(f"value = {text}")
            value = parsed["value"] if len(parsed) == 1 else text
        except (ValueError, RecursionError):
            value = text
        *groups, last = name.strip().split(".")
        place = tree
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):
                raise ConfigError(f"--set {change}: {group} is a value, not a group of settings.")
        place[last] = value
        if (groups, last) == (["train"], "epochs"):
            place.pop("steps", None)  # those of the file would win over the epochs that are asked for
    return tree


def validate(tree: dict[str, Any], where: str) -> Config:
    """Validate a tree of settings; every complaint names its setting."""
    try:
        return Config.model_validate(freeze(tree))
    except ValidationError as error:
        lines = [explain_problem(problem) for problem in error.errors()]
        raise ConfigError(f"{where}: " + "\n".join(lines)) from error


def freeze(value: Any) -> Any:
    """TOML's arrays as the tuples that frozen settings hold."""
    if isinstance(value, dict):
        return {name: freeze(inner) for name, inner in value.items()}
    return tuple(freeze(inner) for inner in value) if isinstance(value, list | tuple) else value


def explain_problem(problem: Any) -> str:
    """One pydantic problem in our words."""
    place, fields, inside = locate_problem(problem["loc"])
    name = ".".join(place)
    match problem["type"]:
        case "extra_forbidden":
            return f"unknown setting {name}.{suggest(place[-1], fields, '.'.join(place[:-1]))}"
        case "missing":
            return f"setting {name} is missing."
        case "union_tag_not_found":
            kinds = [kind for model in inside for kind in typing.get_args(model.model_fields["kind"].annotation)]
            return f"setting {name}.kind is missing. Choose one of {', '.join(map(repr, kinds))}."
        case "union_tag_invalid":
            return f"{name}.kind is {problem['ctx']['tag']!r}, expected one of {problem['ctx']['expected_tags']}."
        case "value_error":
            return f"{name}{': ' if name else ''}{problem['ctx']['error']}."
        case "model_type" | "model_attributes_type":
            names = ", ".join(dict.fromkeys(field for model in inside[:1] for field in model.model_fields))
            return f"setting {name} is {problem['input']!r}, expected a table {{ .. }} of settings such as {names}."
    words = f"{problem['msg'][0].lower()}{problem['msg'][1:]}".replace("valid tuple", 'list, as ["a", "b"]')
    return f"setting {name} is {problem['input']!r}: {words}."


def locate_problem(location: tuple[Any, ...]) -> tuple[list[str], list[str], list[type[BaseModel]]]:
    """The dotted place without the union members that pydantic names, the fields beside it, the models inside it."""
    place: list[str] = []
    models: list[type[BaseModel]] = [Config]
    fields: dict[str, type[BaseModel]] = {}
    for part in location:
        here = {name: model for model in models for name in model.model_fields}
        if isinstance(part, str) and part not in here:
            tagged = [
                m for m in models if part in typing.get_args(getattr(m.model_fields.get("kind"), "annotation", 0))
            ]
            if len(models) > 1 and tagged:
                models = tagged
                continue
            if place and not models:  # a member of a union of plain types
                continue
        place.append(str(part))
        fields = here
        models = list(find_models(here[part].model_fields[part].annotation)) if part in here else []
    return place, list(fields), models


def find_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every settings class inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from find_models(inner)


def suggest(wrong: str, known: Iterable[str], group: str = "") -> str:
    """` Did you mean ...?`, or nothing when nothing is close."""
    close = difflib.get_close_matches(wrong, list(known), n=1)
    return f" Did you mean {group + '.' if group else ''}{close[0]}?" if close else ""


PATHS = {
    "data": ("train", "valid", "test", "images", "captions"), "text": ("raw",),
    "model": ("source_vectors", "target_vectors", "pretrained", "image_weights"),
}  # fmt: skip
"""The settings that hold names of files."""


def map_paths(tree: dict[str, Any], convert: Callable[[str], str]) -> dict[str, Any]:
    """The same tree of settings, checked or not, with every file name in it converted."""

    def inside(value: Any) -> Any:
        match value:
            case str():
                return convert(value)
            case list() | tuple():
                return type(value)(map(inside, value))
            case dict():
                return {name: inside(one) for name, one in value.items()}
        return value

    found = dict(tree)
    for group, names in PATHS.items():
        if isinstance(settings := tree.get(group), dict):
            found[group] = settings | {name: inside(settings[name]) for name in names if name in settings}
    return found


def resolve_paths(config: Config) -> Config:
    """The same settings with `$VARIABLES` in file names filled in and every file name absolute."""
    obtain = getattr(config.data, "obtain", "")

    def absolute(name: str) -> str:
        full = os.path.expandvars(os.path.expanduser(name))
        if "$" in full:
            variable = full[full.index("$") :].split("/")[0]
            hint = f" {obtain}" if obtain else ""
            raise ConfigError(f"the environment variable {variable} is not set, and the data is at {name}.{hint}")
        return str(Path(full).absolute())

    return validate(map_paths(config.model_dump(exclude_none=True), absolute), "settings")


def dump(config: Config) -> str:
    """The whole configuration as TOML."""
    return tomli_w.dumps(config.model_dump(exclude_none=True))
