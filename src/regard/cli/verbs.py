"""What the longer verbs of the command line do once their options are read: lines in, answers out, and what is worth
saying beside them."""

import copy
import io
import itertools
import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import typer
from pydantic_core import to_json
from torch import Tensor

from regard.cli.console import (
    TrainingView,
    catch_interrupts,
    out,
    say,
    show_evaluation,
    show_ledgers,
    show_progress,
    warn,
)
from regard.config.text import TextConfig
from regard.data.files import read_bytes
from regard.data.vocabulary import UNK
from regard.errors import InputError
from regard.evaluation.evaluate import evaluate
from regard.evaluation.fit import fit
from regard.explain import vectors
from regard.explain.alignment import agree
from regard.explain.look import Look, look
from regard.explain.marginals import TAGGINGS, Marginal, Potentials, TooLongError, trace_row
from regard.explain.plots import (
    draw_arcs,
    draw_map,
    find_dark,
    tabulate_calculation,
    tabulate_heads,
    tabulate_potentials,
    tabulate_structures,
    tabulate_sums,
)
from regard.inference.predictor import Predictor
from regard.tasks.task import Answer
from regard.training.checkpoint import write_file
from regard.training.prepare import Prepared, read_examples


def decode_lines(lines: Iterable[bytes], name: str) -> Iterator[str | InputError]:
    """Lines as text; in the place of one that is not UTF-8, an error that names it."""
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            yield InputError(
                f"{name}, line {number}: byte 0x{line[error.start]:02x} at {error.start + 1} is not UTF-8. "
                "Convert the text first, for example with iconv -t UTF-8."
            )


def stdin_lines() -> Iterator[str]:
    """The lines of standard input, all of which must be UTF-8."""
    for line in decode_lines(sys.stdin.buffer, "standard input"):
        if isinstance(line, InputError):
            raise line
        yield line


def open_inputs(files: Sequence[Path], *, are_sources: bool) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The name and the lines of every file; of standard input, if there are none. Files that are sources themselves
    are as many lines."""
    if not files:
        yield "standard input", sys.stdin.buffer
    if are_sources:
        yield "files", [os.fsencode(file) for file in files]
        return
    for file in files:
        hint = f"A text comes on standard input: echo {shlex.quote(str(file))} | regard predict RUN"
        yield str(file), io.BytesIO(read_bytes(str(file), hint))


def tell_cut(predictor: Predictor) -> None:
    """Say how many texts were cut, if any were."""
    if predictor.cut:
        texts = "1 text was" if predictor.cut == 1 else f"{predictor.cut:,} texts were"
        print(f"regard: {texts} cut to {predictor.task.kept_tokens():,} tokens.", file=sys.stderr)


def answer_lines(
    predictor: Predictor, lines: Sequence[str | InputError], what: str, first: int, best: int, prefix: str, scored: bool
) -> list[list[Answer] | InputError]:
    """The answers to every line, or what is wrong with it: one bad line does not lose the others. Lines are called
    `what` and a number, from `first` on."""
    sources = [predictor.task.parse("" if isinstance(line, InputError) else line) for line in lines]
    found = copy.copy(predictor).encode_each(sources, what, first)  # the copy counts what is cut
    wrong = [
        next((one for one in both if isinstance(one, InputError)), None) for both in zip(lines, found, strict=True)
    ]
    good = [source for source, problem in zip(sources, wrong, strict=True) if problem is None]
    answers = iter(predictor.predict(good, best=best, prefixes=[prefix] * len(good), logprobs=scored))
    return [next(answers) if problem is None else problem for problem in wrong]


def train_run(prepared: Prepared, run: Path, device: str) -> None:
    """Train with everything a person at a terminal wants around it. A training that was interrupted ends as programs
    do that a signal ends, with 128 and its number: what was to follow it does not."""
    with TrainingView(prepared.config, run) as view, catch_interrupts() as stop:
        show_ledgers(prepared.splits.ledgers, view.say)
        view.say(prepared.facts())
        progress = fit(prepared, run, view, device=device, stop=lambda: bool(stop()))
        name = shlex.quote(str(run))
        if stop():
            saved = f"stopped at step {progress.step:,}; everything is saved."
            view.say(f"{saved} Go on with: regard train --resume {name}")
            raise typer.Exit(128 + stop())
        best = "" if progress.best is None else f"; best {prepared.config.evaluate.metrics[0]} {progress.best:.2f}"
        early = progress.worse and not progress.late and progress.step < (prepared.config.train.steps or 0)
        why = f" (then {progress.worse} validations brought nothing better)" if early else ""
        why = " (then train.minutes were over)" if progress.late else why
        took = f"{progress.seconds / 60:.1f} min"
        view.say(f"done: {progress.step:,} steps{why} in {took}{best} at step {progress.best_step:,}")
        split = "" if prepared.splits.test else " --split valid"
        asked = "photo.jpg" if prepared.task.files_are_sources else "< input.txt"
        view.say(f"next: regard evaluate {name}{split}, regard predict {name} {asked}")


def continue_prompt(predictor: Predictor, prompt: str) -> None:
    """Write what follows a prompt, as it comes."""
    written = ""
    for part in predictor.stream(predictor.task.parse(prompt)):
        print(part, end="", flush=True)
        written += part
    print()
    tell_cut(predictor)
    if predictor.task.fills_context(prompt + written):
        full = f"the context of {predictor.config.text.max_length:,} tokens is full"
        print(f"regard: {full}; --set decode.slide=true goes on if positions allow it.", file=sys.stderr)


def answer_input(predictor: Predictor, files: Sequence[Path], best: int, prefix: str, as_json: bool) -> None:
    """Answer every line of files, or of standard input, with a line; a person at a terminal gets each answer at once. A
    line that cannot be answered is named, its answer is empty, and the status is 2 in the end."""
    size, failed = 1 if not files and sys.stdin.isatty() else 256, False
    are_sources = predictor.task.files_are_sources and bool(files)
    for name, stream in open_inputs(files, are_sources=are_sources):
        lines, first = decode_lines(stream, name), 1
        what = "file" if are_sources else f"{name}, line" if files else "line"
        while group := list(itertools.islice(lines, size)):
            for answers in answer_lines(predictor, group, what, first, best, prefix, as_json):
                if isinstance(answers, InputError):
                    print(f"regard: {answers}", file=sys.stderr)
                    answers, failed = [], True
                for flag in answers[0].flags if answers else ():
                    print(f"regard: {flag}", file=sys.stderr)
                if as_json:
                    print(json.dumps([answer.tree() for answer in answers], ensure_ascii=False))
                else:
                    texts = (" ".join(answer.text.splitlines()) for answer in answers)
                    print("\t".join(text if best == 1 else text.replace("\t", " ") for text in texts))
            sys.stdout.flush()
            first += len(group)
    tell_cut(predictor)
    if failed:
        raise typer.Exit(2)


def score_split(predictor: Predictor, run: Path, split: str, outputs: Path | None, as_json: bool) -> None:
    """Score a run on one of its splits; `outputs` gets what it answered, a line each."""
    if outputs is not None and outputs.is_dir():
        raise InputError(f"--outputs: {outputs} is a directory, a file's name is wanted.")
    splits = read_examples(predictor.config, split)
    examples = getattr(splits, split)
    if outputs is not None and not any(example.source for example in examples):
        raise InputError("--outputs: texts without a source are scored themselves, there are no outputs.")
    data = predictor.config.data
    missing = ", ".join(f"{data.remedy(name)} for {name}" for name in data.missing())
    hint = f" Set {missing}." if missing else ""
    if not examples and (others := [name for name in ("valid", "train") if getattr(splits, name)]):
        raise InputError(f"this run has no {split} data: use --split {others[0]}.{hint}")
    with show_progress("evaluating") as report:
        found = evaluate(predictor, examples, predictor.config.evaluate, report, warn)
    if outputs is not None:
        write_file(outputs, "".join(" ".join(text.splitlines()) + "\n" for text in found.outputs).encode())
    if as_json:
        print(to_json({"run": str(run), "split": split, **found.tree()}, inf_nan_mode="null").decode())
    else:
        show_evaluation(found)


def show_maps(found: Look, name: str | None, head: int | None, token: int | None) -> None:
    """One look in the terminal: every head's entropy and distance, one row's numbers, or the map of one attention."""
    if name == "all" and found.find_map():
        out.print(tabulate_heads((one.name, one.entropy(), one.distance()) for one in found.maps))
    elif token is not None:
        show_row(found, name, head or 0, token)
    else:
        weights, rows, columns = found.label(name, head)
        top = find_dark(weights) if found.map(name, head).is_long else float(weights.max())
        say(f"{found.title(name, head)}; █ is {top:.2g}")
        if found.is_tree(name):
            out.print(draw_arcs(weights, columns, most=out.width))
        out.print(draw_map(weights, rows, columns, most=out.width, top=max(top, 1e-6)))


def check_views(file: Path | None, name: str | None, head: int | None, token: int | None, back: Path | None) -> None:
    """Refuse to show two views of one look at a time."""
    page = file is not None and file.suffix.lower() in (".html", ".json")
    every = name if name == "all" and not file else None
    views = {"--out": file, "--token": token if page or not file else None, "--back": back, "--map all": every}
    if len(asked := [option for option, value in views.items() if value is not None]) > 1:
        raise InputError(f"{' and '.join(asked)} are different views: ask for one of them at a time.")
    if head is not None and name == "all":
        raise InputError("--map all shows every head: leave --head out.")
    if (head is not None or name) and page:
        raise InputError(f"{file} will hold every map: leave --map and --head out.")


def save_maps(found: Look, file: Path, name: str | None, head: int | None, token: int | None) -> None:
    """One look in a file."""
    found.save(file, name, head, token)
    say(f"written: {file} ({file.stat().st_size:,} bytes)")


def show_row(found: Look, name: str | None, head: int, token: int) -> None:
    """Number by number, how one row of one head comes about; of a structure's, by the structures of a short text."""
    one, attends = found.outlines[found.find_map(name)], found.find_map(name) in found.uses
    rows, columns = found.names(one.rows), found.names(one.columns)
    calculation = found.calculate(token, head, name) if attends else None
    try:
        traced: Marginal | Potentials | str | None = trace_row(found, token, head, name)
    except TooLongError as problem:
        traced = str(problem)
    say(f"{rows[token]} ({found.title(name, head if attends else None)})")
    if calculation is not None:
        out.print(tabulate_calculation(calculation, columns))
    match traced:
        case str():
            say(traced)
        case Potentials():
            say("a matching is balanced: what is added to its row and to every column sets their sums")
            out.print(tabulate_potentials(traced, columns))
        case Marginal():
            show_marginal(traced, found.label(name, head)[0][token], rows, columns)


def show_marginal(found: Marginal, weights: Tensor, rows: Sequence[str], columns: Sequence[str]) -> None:
    """The likeliest structures behind a row, and for every column the sum over those that have it."""
    shown = len(found.chances)
    say(f"the {shown} likeliest of {found.total:,} {found.kind}")
    out.print(tabulate_structures(found, rows, columns))
    if found.complete:
        say(f"all {found.total:,} {found.kind} added up")
    else:
        most = f"the text is too long to enumerate all {found.kind} (at most {TAGGINGS:,})"
        say(f"{most}: these {shown} cover {found.covered:.4f} of the probability, the sums are of them alone")
    out.print(tabulate_sums(found, weights, columns))


def show_agreement(found: Look, back: Predictor) -> None:
    """The words that look at each other both ways, by a run of the other direction."""
    check_inverse(found, back)
    pairs = agree(found, look(back, found.answer.text, target=found.text))
    for answer, source in pairs:
        say(f"{answer} - {source}")
    if not pairs:
        say("no two words look at each other both ways.")


def check_inverse(found: Look, back: Predictor) -> None:
    """Refuse a run that is not of the other direction: by its languages, where both runs name theirs, or by a
    vocabulary that does not know the words."""
    own, other = found.predictor.config.text.languages, back.config.text.languages
    if TextConfig().languages not in (own, other) and other != own[::-1]:
        wanted = f"a run from {own[1]} to {own[0]} is wanted"
        raise InputError(f"--back: {back.run} is from {other[0]} to {other[1]}, {wanted} (text.languages).")
    for text, vocabulary in ((found.answer.text, back.source), (found.text, back.target)):
        ids = vocabulary.encode(text).ids
        if 2 * ids.count(UNK) > len(ids):
            raise InputError(
                f"--back: {back.run} does not know the words of {text!r}. Give a run of the other direction."
            )


def show_words(predictor: Predictor, words: Sequence[str]) -> None:
    """The words nearest to one, or those that answer an analogy of three."""
    for text, cosine in vectors.nearest_words(predictor, words):
        print(f"{cosine:.3f}\t{text}")


def embed_tokens(predictor: Predictor, file: Path) -> None:
    """A vector for every token of standard input."""
    sources = [predictor.task.parse(line) for line in stdin_lines()]
    vectors.save_tokens(file, vectors.token_states(predictor, sources), predictor.source)
    tell_cut(predictor)


def embed_lines(predictor: Predictor, file: Path | None, picture: Path | None, near: int, normalize: bool) -> None:
    """A vector for every line of standard input: into a file, as a picture, as the nearest lines, or as numbers."""
    lines = list(stdin_lines())
    found = vectors.embed(predictor, map(predictor.task.parse, lines), normalize=normalize)
    tell_cut(predictor)
    if file is not None:
        vectors.save_vectors(file, found)
    if picture is not None:
        vectors.draw_vectors(picture, found, lines)
    for text, others in zip(lines, vectors.nearest(found, near) if near else [], strict=False):
        print(text, *(f"  {cosine:.3f}  {lines[number]}" for number, cosine in others), sep="\n")
    if file is None and picture is None and not near:
        for row in found.tolist():
            print(*(f"{number:.6g}" for number in row))
