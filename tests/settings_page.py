"""The page of all settings, made from the settings themselves: python tests/settings_page.py > docs/settings.md"""

import json
from typing import Any, Literal, get_args, get_origin

from regard.config import data, model, run, structure, text, vision
from regard.config.settings import Settings
from regard.tasks import TASKS

METRICS = "; ".join(
    f"{task.verb}: " + ", ".join(f"`{getattr(metric, 'name', metric)}`" for metric in task.metrics)
    for task in dict.fromkeys(TASKS.values())
    if task.metrics
)
"""Verb of a task: the names of its metrics."""
HEAD = """# Settings

Every setting of a `.toml` file, with its default; `--set train.steps=200` changes one. Recipes (`regard recipes`) are
such files, and every run keeps its own, whole, in `config.toml`. What a server can be told is in [serve.md](serve.md).
"""
PARTS: list[tuple[str, str, list[type[Settings]]]] = [
    (
        "`[data]`: where examples come from",
        "A path in a file begins at the folder of that file, one in `--set` at the current folder. It may begin with "
        "`~` or an environment variable, such as `$REGARD_DATA`. A name that ends in `.gz` is gzipped.",
        [
            *(
                data.FileData,
                data.ParallelData,
                data.Sides,
                data.ListedData,
                data.TextData,
                data.TableData,
                data.JsonData,
            ),
            *(data.LabelledData, data.StoryData, data.SquadData, data.ColumnsData, data.ConlluData),
            *(data.DocumentData, data.CaptionData),
            *(data.GeneratedData, data.ReverseData, data.NumbersData, data.DatesData, data.TransduceData),
            *(data.LineupData, data.ListopsData, data.ShapesData, data.DigitsData),
        ],
    ),
    ("`[text]`: text and tokens", "", [text.TextConfig, text.Tokenization]),
    (
        "`[model]`: which kind, and how large",
        "",
        [
            *(model.Seq2SeqConfig, model.RNNConfig, model.BlockConfig, model.TransformerConfig),
            *(model.LanguageModelConfig, model.EncoderConfig, model.ClassifierConfig, model.ReaderConfig),
            *(structure.TaggerConfig, structure.LineupConfig),
            *(vision.VisionConfig, vision.CaptionerConfig, vision.ImageClassifierConfig),
        ],
    ),
    ("`[train]`: learning", "", [run.TrainConfig]),
    ("`[decode]`: searching for answers", "", [run.DecodeConfig]),
    ("`[evaluate]`: scores", f"The metrics of each task: {METRICS}.", [run.EvaluateConfig]),
]
BARE = (Settings, model.ModelConfig)
"""Groups that bring no settings of their own."""


def choices(kind: Any) -> tuple[Any, ...]:
    """What may be chosen, if a setting is a choice."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return next((found for part in get_args(kind) if (found := choices(part))), ())


def kinds(group: type[Settings]) -> str:
    """The kinds that a group of settings is for, if it is for some."""
    kind = group.model_fields.get("kind")
    names = choices(kind.annotation) if kind and kind.is_required() else ()
    return " or ".join(f'`kind = "{name}"`' for name in names)


def shared(group: type[Settings]) -> str:
    """What a group has from another, in words."""
    about = " ".join((group.__doc__ or "").split()).partition(";")[0].rstrip(".")
    return f"those of {kinds(group)}" if kinds(group) else about[0].lower() + about[1:]


def valued(default: Any) -> str:
    """A default as a file of settings writes it; what is not set is nothing."""
    return "" if default is None or isinstance(default, Settings) else f"`{json.dumps(default)}`"


def rows(group: type[Settings]) -> list[str]:
    """A row for each setting that a group does not have from another."""
    above = {name for base in group.__bases__ if issubclass(base, Settings) for name in base.model_fields}
    out = []
    for name, field in group.model_fields.items():
        if name in above or (name == "kind" and field.is_required()):
            continue
        default = "*wanted*" if field.is_required() else valued(field.default)
        some = choices(field.annotation)
        listed = f"One of {', '.join(f'`{choice}`' for choice in some)}." if some else ""
        words = " ".join(part for part in (listed, " ".join((field.description or "").split())) if part)
        out.append(f"| `{name}` | {default} | {words} |".replace("  ", " "))
    return out


def page() -> str:
    """All of it."""
    lines = [HEAD]
    for title, words, groups in PARTS:
        lines += [f"## {title}\n"] + ([f"{words}\n"] if words else [])
        for group in groups:
            bases = [base for base in group.__bases__ if issubclass(base, Settings) and base not in BARE]
            also = f" Also {' and '.join(map(shared, bases))}." if bases else ""
            about = " ".join((group.__doc__ or "").split())
            lines.append(f"{kinds(group)}: {about}{also}\n" if kinds(group) else f"{about}{also}\n")
            if own := rows(group):
                lines += ["| setting | default | what |", "| --- | --- | --- |", *own, ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(page(), end="")
