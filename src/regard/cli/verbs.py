"""What the longer verbs of the command line do once their options are read: lines in, answers out, and what is worth
saying beside them."""

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from pydantic_core import to_json

from regard.cli.console import counting, out, say, show_evaluation
from regard.config.config import LanguageConfig
from regard.errors import InputError, RegardError
from regard.evaluation.evaluate import evaluate, hint
from regard.explain import vectors
from regard.explain.look import Look, agreed, look
from regard.explain.plots import calculated, drawn, surveyed
from regard.inference.predictor import Output, Predictor
from regard.training.checkpoint import replace
from regard.training.run import read_splits, same_data

# --- reading standard input ------------------------------------------------------------------------------------------


def stdin_lines() -> Iterator[str]:
    """The lines of standard input; one that is not UTF-8 is an error that names it."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(
                f"standard input, line {number}: byte 0x{line[error.start]:02x} at {error.start + 1} is not UTF-8. "
                "Convert the text first, for example with iconv -t UTF-8."
            ) from error


def tell_cut(predictor: Predictor) -> None:
    """Say how many texts were cut, if any were."""
    if predictor.cut:
        most = predictor.config.text.max_length // (1 + (predictor.config.model.kind == "language"))
        texts = "1 text was" if predictor.cut == 1 else f"{predictor.cut:,} texts were"
        print(f"regard: {texts} cut to {most:,} tokens.", file=sys.stderr)


def tell_full(predictor: Predictor, text: str) -> None:
    """Say so if a prompt and its continuation have filled the context of a language model."""
    most, model = predictor.config.text.max_length, predictor.config.model
    if not isinstance(model, LanguageConfig) or predictor.config.decode.slide:
        return
    if len(predictor.source.encode(text).ids) + model.begin >= most:
        print(
            f"regard: the context of {most:,} tokens is full; --set decode.slide=true goes on if positions allow it.",
            file=sys.stderr,
        )


def chunks(lines: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lines by the `size`, as they come; those before a line that cannot be read come before its error."""
    group: list[str] = []
    try:
        for line in lines:
            group.append(line)
            if len(group) == size:
                yield group
                group = []
    except RegardError:
        if group:
            yield group
        raise
    if group:
        yield group


def answers_to(
    predictor: Predictor, lines: Sequence[str], best: int, prefix: str, first: int
) -> tuple[list[list[Output]], InputError | None]:
    """The answers to lines up to the first that cannot be taken, and what is wrong with that one: one bad line does not
    lose the answers to those before it."""

    def answered(some: Sequence[str]) -> list[list[Output]]:
        return predictor.predict(some, best=best, prefixes=[prefix] * len(some) if prefix else None, first=first)

    try:
        return answered(lines), None
    except InputError as error:
        count = 0
        with contextlib.suppress(InputError):
            for line in lines:
                predictor.encode(line)
                count += 1
        if count == len(lines):
            raise
        return answered(lines[:count]), error


# --- answering -------------------------------------------------------------------------------------------------------


def continue_prompt(predictor: Predictor, prompt: str) -> None:
    """Write what follows a prompt, as it comes."""
    written = ""
    for part in predictor.stream(prompt):
        print(part, end="", flush=True)
        written += part
    print()
    tell_cut(predictor)
    tell_full(predictor, prompt + written)


def answer_input(predictor: Predictor, best: int, prefix: str, as_json: bool) -> None:
    """Answer every line of standard input with a line; a person at a terminal gets each answer at once."""
    line = 1
    for group in chunks(stdin_lines(), 1 if sys.stdin.isatty() else 256):
        answers, problem = answers_to(predictor, group, best, prefix, line)
        line += len(group)
        for outputs in answers:
            if as_json:
                print(json.dumps([output.tree() for output in outputs], ensure_ascii=False))
            else:
                lines = (" ".join(output.text.splitlines()) for output in outputs)
                print("\t".join(line if best == 1 else line.replace("\t", " ") for line in lines))
        sys.stdout.flush()
        if problem:
            raise problem
    tell_cut(predictor)


def score_split(predictor: Predictor, run: Path, split: str, outputs: Path | None, as_json: bool) -> None:
    """Score a run on one of its splits; `outputs` gets what it answered, a line each."""
    if outputs is not None and outputs.is_dir():
        raise InputError(f"--outputs: {outputs} is a directory, a file's name is wanted.")
    if outputs is not None and predictor.config.model.kind == "language":
        raise InputError("--outputs: a language model is scored by the texts themselves, there are no outputs.")
    splits = read_splits(predictor.config, split)
    examples = getattr(splits, split)
    if not examples and (others := [name for name in ("valid", "train") if getattr(splits, name)]):
        raise InputError(f"this run has no {split} data: use --split {others[0]}.{hint(predictor.config.data)}")
    if splits.train and not same_data(run, splits):
        print(
            f"regard: warning: the training data is not what {run} learned from (files or settings have changed): it "
            f"may have seen examples of this {split} split.",
            file=sys.stderr,
        )
    with counting("evaluating") as report:
        found = evaluate(predictor, examples, predictor.config.evaluate, report)
    if outputs is not None:
        replace(outputs, "".join(" ".join(text.splitlines()) + "\n" for text in found.outputs).encode())
    if as_json:
        print(to_json({"run": str(run), "split": split, **found.tree()}, inf_nan_mode="null").decode())
    else:
        show_evaluation(found)


# --- looking ---------------------------------------------------------------------------------------------------------


def show_maps(found: Look, name: str | None, head: int | None, token: int | None) -> None:
    """One look in the terminal: every head's entropy and distance, one row's numbers, or the map of one attention."""
    if name == "all" and found.called():
        out.print(surveyed((one.name, one.entropy(), one.distance()) for one in found.maps))
    elif token is not None:
        _, rows, columns = found.labelled(name, head or 0)
        calculation = found.calculation(token, head or 0, name)
        say(f"{rows[token]} ({found.titled(name, head or 0)})")
        out.print(calculated(calculation, columns))
    else:
        weights, rows, columns = found.labelled(name, head)
        say(f"{found.titled(name, head)}; █ is {float(weights.max()):.2f}")
        out.print(drawn(weights, rows, columns, most=out.width))


def show_agreed(found: Look, back: Predictor) -> None:
    """The words that look at each other both ways, by a run of the other direction."""
    pairs = agreed(found, look(back, found.answer.text, target=found.text))
    for answer, source in pairs:
        say(f"{answer} - {source}")
    if not pairs:
        say("no two words look at each other both ways.")


# --- vectors ---------------------------------------------------------------------------------------------------------


def show_words(predictor: Predictor, words: Sequence[str]) -> None:
    """The words nearest to one, or those that answer an analogy of three."""
    for text, cosine in vectors.words(predictor, words):
        print(f"{cosine:.3f}\t{text}")


def embed_tokens(predictor: Predictor, file: Path) -> None:
    """A vector for every token of standard input."""
    vectors.save_tokens(file, vectors.states(predictor, list(stdin_lines())), predictor.source)
    tell_cut(predictor)


def embed_lines(predictor: Predictor, file: Path | None, picture: Path | None, near: int, normalize: bool) -> None:
    """A vector for every line of standard input: into a file, as a picture, as the nearest lines, or as numbers."""
    lines = list(stdin_lines())
    found = vectors.embed(predictor, lines, normalize=normalize)
    tell_cut(predictor)
    if file is not None:
        vectors.save(file, found)
    if picture is not None:
        vectors.draw(picture, found, lines)
    for text, others in zip(lines, vectors.nearest(found, near) if near else [], strict=False):
        print(text, *(f"  {cosine:.3f}  {lines[number]}" for number, cosine in others), sep="\n")
    if file is None and picture is None and not near:
        for row in found.tolist():
            print(*(f"{number:.6g}" for number in row))
