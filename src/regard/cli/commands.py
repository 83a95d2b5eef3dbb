"""The command line: a dozen verbs, each a few lines that call the library. Nothing heavy is imported before a verb
needs it."""

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

import regard
from regard.cli.cost import cost
from regard.errors import ConfigError, InputError, RegardError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train, run and look inside attention models.\n\nA minute: `regard demo`. Your own data: "
    "`regard check my.toml`, `regard train my.toml --run runs/mine`, `regard predict runs/mine < input.txt`.",
)

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a setting, as in --set train.steps=200.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A directory that `regard train` or `import` made.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Engine = Annotated[str, typer.Option(help="What decodes: auto (CTranslate2 where it can), torch or ctranslate2.")]


def version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=version, is_eager=True, help="Show version.")] = False,
) -> None:
    """Options that come before a verb."""


@app.command()
def demo(run: Annotated[Path | None, typer.Option(help="Keep the run here.")] = None) -> None:
    """Train, score, translate and look inside on built-in data, in about a minute."""
    from regard.cli.demo import demo as show

    show(run)


@app.command()
def recipes() -> None:
    """List the built-in recipes."""
    from rich.console import Console
    from rich.table import Table

    from regard.config.toml import parse, recipes

    table = Table("recipe", "what it does", "time")
    for name, path in recipes().items():
        config = parse(path)
        table.add_row(name, config.about, config.time)
    Console().print(table)


@app.command()
def check(
    name: Annotated[str, typer.Argument(metavar="CONFIG", help="A recipe, or a .toml file.")], changes: Changes = None
) -> None:
    """Report what is in the data and what is wrong with it, before training.

    Example: `regard check numbers --set data.language=ko`
    """
    from regard.cli.console import say, show_ledgers, warn
    from regard.training.prepare import find_doubts, prepare

    prepared = prepare(regard.read(name, changes or (), warn))
    show_ledgers(prepared.splits.ledgers, say)
    say(prepared.facts())
    for doubt in find_doubts(prepared):
        say(f"warning: {doubt}")
    for example in prepared.splits.train[:3]:
        sides = [text if len(text) <= 200 else f"{text[:199]}…" for text in (str(example.source), example.target)]
        say(f"  {' -> '.join(sides if example.source else sides[1:])}")


@app.command(context_settings={"allow_extra_args": True})
def train(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A recipe, or a .toml file.")] = None,
    run: Annotated[Path | None, typer.Option(help="The directory to make; runs/CONFIG by default.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    changes: Changes = None,
    device: Device = "auto",
) -> None:
    """Train a model. Ctrl-C saves the run and prints the command that resumes it.

    Examples: `regard train numbers --run runs/n`, `regard train my.toml --set train.steps=2000`,
    `regard train --resume runs/n`
    """
    from regard.cli.console import tell, warn
    from regard.cli.verbs import train_run
    from regard.training.device import choose

    if more := context.args:
        raise ConfigError(f"{more[0]} is one name too many behind {name}. The run's directory is --run {more[0]}.")
    if (name is None) == (resume is None):
        raise ConfigError("give a recipe or a .toml file to train, or --resume RUN to go on with a run (not both).")
    choose(device)
    if resume is not None:
        if run is not None:
            raise ConfigError("--run names a new run, --resume one that is there: give one of them.")
        if changes:
            raise ConfigError("--set cannot change a run that is resumed: it would not be the same run. Start another.")
        place, prepared = resume, regard.resume_run(resume)
    else:
        place = run or Path("runs") / Path(str(name)).stem
        prepared = regard.start_run(regard.read(str(name), changes or (), warn), place, tell, device=device)
    train_run(prepared, place, device)


@app.command()
def predict(
    run: Run,
    files: Annotated[list[Path] | None, typer.Argument(metavar="[FILE]...", help="Texts; else standard input.")] = None,
    best: Annotated[int, typer.Option(min=1, help="Answers per line, best first, separated by tabs.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Answers with scores and token log-probabilities.")] = False,
    prefix: Annotated[str, typer.Option(help="Force every answer to begin with this.")] = "",
    prompt: Annotated[str | None, typer.Option(help="Continue this text and stream it; reads no input.")] = None,
    changes: Changes = None,
    device: Device = "auto",
    engine: Engine = "auto",
) -> None:
    """Answer files or standard input line by line. The run knows its task: it translates, continues, classifies, tags,
    or answers a question (then a line is the question, a tab and the context). A line that cannot be answered is named,
    its answer is empty, and the status is 2 in the end.

    Examples: `echo einundzwanzig | regard predict runs/n`, `regard predict runs/n input.txt --best 3 --json`,
    `regard predict runs/shakespeare --prompt "ROMEO:" --set decode.temperature=0.7 --set decode.max_extra=300`
    """
    from regard.cli.verbs import answer_input, continue_prompt

    predictor = regard.load(run, changes or (), device, engine)
    if prompt is None:
        answer_input(predictor, files or [], best, prefix, as_json)
    elif files or best > 1 or as_json or prefix:
        raise InputError("--prompt continues one text as it comes: leave files, --best, --json and --prefix out.")
    else:
        continue_prompt(predictor, prompt)


@app.command(context_settings={"allow_extra_args": True})
def evaluate(
    context: typer.Context,
    run: Run,
    split: Annotated[str, typer.Option(help="test, valid or train.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
    outputs: Annotated[Path | None, typer.Option(help="Also write the outputs to this file, one per line.")] = None,
    changes: Changes = None,
    device: Device = "auto",
    engine: Engine = "auto",
) -> None:
    """Score a run on its test data: overall, and by source length.

    Examples: `regard evaluate runs/n --json`, `regard evaluate runs/n --set decode.beam_size=5`,
    `regard evaluate runs/n --set evaluate.unseen=true`, `regard evaluate runs/n --set data.test=other.tsv`
    """
    from regard.cli.verbs import score_split

    if more := context.args:
        file = f"a file to score on is --set data.test={more[0]}, with its data.kind if that is another"
        raise ConfigError(f"{more[0]} is one name too many behind {run}: {file}; runs are scored one by one.")
    if split not in ("test", "valid", "train"):
        raise ConfigError(f"--split is {split!r}, expected test, valid or train.")
    score_split(regard.load(run, changes or (), device, engine), run, split, outputs, as_json)


@app.command()
def look(
    run: Run,
    text: Annotated[str, typer.Argument(help="A text; for a model that answers, question, tab, context.")],
    file: Annotated[Path | None, typer.Option("--out", help="Write .html, .json, .png, .svg or .pdf.")] = None,
    name: Annotated[str | None, typer.Option("--map", help="One attention by name; all: every head.")] = None,
    head: Annotated[int | None, typer.Option(min=0, help="One head, from 0; else the mean (--token: head 0).")] = None,
    token: Annotated[int | None, typer.Option(min=0, help="Calculate this row; --out: of an image, its look.")] = None,
    target: Annotated[str | None, typer.Option(help="Look at this answer instead of the model's own.")] = None,
    back: Annotated[Path | None, typer.Option(help="A run of the other direction: words that agree both ways.")] = None,
    changes: Changes = None,
) -> None:
    """Answer one text and show where each token of the answer looked, in the terminal or in a file; if long, by tiles.

    Examples: `regard look runs/n einundzwanzig`, `regard look runs/n einundzwanzig --out why.html`,
    `regard look runs/n einundzwanzig --token 0`, `regard look runs/m "two dogs" --map all --out heads.png`
    """
    from regard.cli.console import say
    from regard.cli.verbs import check_views, save_maps, show_agreement, show_maps, tell_cut

    check_views(file, name, head, token, back)
    predictor = regard.load(run, changes or ())
    found = regard.look(predictor, predictor.task.parse(text), target=target)
    say(f"{found.source.source} -> {found.answer.text}\n")
    if file is not None:
        save_maps(found, file, name, head, token)
    elif back is not None:
        show_agreement(found, regard.load(back, changes or ()))
    else:
        show_maps(found, name, head, token)
    tell_cut(predictor)


@app.command()
def embed(
    run: Run,
    file: Annotated[Path | None, typer.Option("--out", help="Write the vectors to this .npy file.")] = None,
    tokens: Annotated[bool, typer.Option(help="A vector for every token; --out has a .json beside it.")] = False,
    normalize: Annotated[bool, typer.Option(help="Scale every vector to length 1.")] = False,
    near: Annotated[int, typer.Option(min=0, help="Show each line's nearest other lines.")] = 0,
    word: Annotated[str | None, typer.Option("--words", help="The words nearest to this one; reads no input.")] = None,
    analogy: Annotated[str | None, typer.Option(help="'a b c': what is to c as b is to a; reads no input.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the lines in two dimensions: .png, .svg, .pdf.")] = None,
    changes: Changes = None,
    device: Device = "auto",
) -> None:
    """Turn every line of standard input into a vector: saved, printed, drawn, or compared with the others.

    Examples: `regard embed runs/m --out vectors.npy < lines.txt`, `regard embed runs/m --near 3 < lines.txt`,
    `regard embed runs/m --analogy "man king woman"`
    """
    from regard.cli.verbs import embed_lines, embed_tokens, show_words

    given = {"--words": word is not None, "--analogy": analogy is not None, "--out": file is not None}
    given |= {"--tokens": tokens, "--near": near > 0, "--normalize": normalize, "--picture": picture is not None}
    asked = [option for option, value in given.items() if value]
    if (word is not None or analogy is not None) and len(asked) > 1:
        raise InputError(f"{' and '.join(asked)}: words are looked up alone, without any other option.")
    if tokens and asked != ["--out", "--tokens"]:
        raise InputError("--tokens goes with --out FILE.npy alone: the tokens' texts are written beside it.")
    predictor = regard.load(run, changes or (), device)
    if word is not None or analogy is not None:
        show_words(predictor, analogy.split() if analogy is not None else [word or ""])
    elif tokens and file is not None:
        embed_tokens(predictor, file)
    else:
        embed_lines(predictor, file, picture, near, normalize)


app.command()(cost)


@app.command()
def serve(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; the first is the default.")],
    host: Annotated[str | None, typer.Option(help="127.0.0.1 by default; 0.0.0.0 serves other machines too.")] = None,
    port: Annotated[int | None, typer.Option(help="5000 by default; 0 takes a free one.")] = None,
    keys: Annotated[str | None, typer.Option(envvar="REGARD_KEYS", help="API keys, separated by commas.")] = None,
    changes: Changes = None,
    device: Device = "auto",
    engine: Engine = "auto",
) -> None:
    """Serve runs over HTTP: a web page, an API (/docs), LibreTranslate's protocol and OpenAI's completions. Ctrl-C
    finishes open requests, then stops.

    Examples: `regard serve runs/n`, `regard serve runs/en-de runs/de-en --port 8000 --set serve.max_queue=64`
    """
    from regard.server.app import read_settings
    from regard.server.app import serve as start

    listed = None if keys is None else json.dumps([key.strip() for key in keys.split(",")])
    given = {"host": host, "port": port, "keys": listed}
    own = [f"serve.{name}={value}" for name, value in given.items() if value is not None]
    settings, others = read_settings([*own, *(changes or ())])
    start(runs, settings, others, device, engine)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="DIR", help="A directory, a .gguf file, minilm or smollm2.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The directory to make.")],
) -> None:
    """Turn weights that others trained into a run: BERT, GPT-2, GPT-NeoX, Llama, Marian and their relatives.

    Examples: `regard import downloads/bert-base runs/bert`, `regard import smollm2 runs/smollm2`
    """
    from regard.cli.console import say
    from regard.formats.huggingface_import import import_run

    config = import_run(source, run)
    say(f"{run} is a run of kind {config.model.kind} now ({config.about})")


@app.command()
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to make.")],
    to: Annotated[str, typer.Option(help="huggingface or ctranslate2.")] = "huggingface",
    quantization: Annotated[str, typer.Option(help="For ctranslate2: float32, int8, ...")] = "float32",
) -> None:
    """Export a run to Hugging Face transformers (`from_pretrained`) or to CTranslate2.

    Examples: `regard export runs/n --to huggingface out`,
    `regard export runs/n --to ctranslate2 fast --quantization int8`
    """
    from regard.cli.console import say

    if to == "ctranslate2":
        from regard.formats.ctranslate2 import export_ctranslate2

        export_ctranslate2(run, folder, quantization)
        made = "CTranslate2"
    elif to == "huggingface":
        from regard.formats.huggingface_export import export_huggingface

        if quantization != "float32":
            raise ConfigError(f"--quantization is {quantization!r}, which only --to ctranslate2 knows. Leave it out.")
        made = export_huggingface(run, folder, say)
    else:
        raise ConfigError(f"--to is {to!r}, expected huggingface or ctranslate2.")
    say(f"written: {folder} ({made})")


def main() -> None:
    """Run the command line: a RegardError is a message and status 2; anything else is a bug and shows itself. A warning
    is a line on standard error. What is written is UTF-8, as what is read."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *where: print(f"regard: {message}", file=sys.stderr)
            app()
    except RegardError as error:
        print(f"regard: {error}", file=sys.stderr)
        sys.exit(2)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a tokenizer's Rust code; it has no name to import
            raise
        print(f"regard: the tokenizer cannot read a text: {error}. Is the run's tokenizer.json whole?", file=sys.stderr)
        sys.exit(2)
