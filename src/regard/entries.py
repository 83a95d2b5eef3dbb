"""Their tokenizers -> our vocabularies. Entries are moved by four; in front of them come <pad> <unk> <bos> <eos>."""

import json
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from regard.checkpoint import Tensors
from regard.errors import DataError
from regard.forms import Form, Reading, Tree
from regard.text import SPECIAL, UNK


class Given(NamedTuple):
    """A model as it came."""

    where: Path
    tree: Tree
    """config.json, with what generation_config.json changes."""
    tensors: Tensors
    tokenizer: Tree


def tokenizer_of(tree: Tree, where: Path) -> Tokenizer:
    """A tokenizer of its JSON."""
    try:
        return Tokenizer.from_str(json.dumps(tree))
    except Exception as error:  # the library raises plain Exception for every malformed tree
        raise DataError(f"{where}: the tokenizer cannot be used: {error}.") from error


def entries(tokenizer: Tree) -> dict[str, int]:
    """Every entry of a tokenizer's JSON and its id, also those that were added."""
    vocab = tokenizer["model"]["vocab"]
    known = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return known | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}


def is_ours(tokenizer: Tree) -> bool:
    """Whether a vocabulary begins as ours do."""
    known = entries(tokenizer)
    return [known.get(token) for token in SPECIAL] == list(range(len(SPECIAL)))


def unknown(tokenizer: Tree) -> int | None:
    """The entry for what is unknown, if the tokenizer has one."""
    model = tokenizer["model"]
    if model["type"] == "Unigram":
        found: int | None = model.get("unk_id")
        return found
    return entries(tokenizer).get(model.get("unk_token"))


def moved(given: Given, count: int) -> Tree:
    """The tokenizer's JSON with our special entries at 0 to 3 and the others behind them, `count` in all: what the
    embedding has a row for and the tokenizer no entry gets one, never used. Texts are framed by us, not by it."""
    tree, known = given.tokenizer, entries(given.tokenizer)
    plain = {"truncation": None, "padding": None, "post_processor": None}
    if max(known.values()) >= count:
        raise DataError(f"{given.where}: the tokenizer has {max(known.values()) + 1:,} entries, the model {count:,}.")
    if is_ours(tree):
        return tree | plain
    shift = len(SPECIAL)
    names = {i: token if token not in SPECIAL else f"{token[:-1]}:{i}>" for token, i in known.items()}
    ordered = [*SPECIAL, *(names.get(i, f"<unused:{i}>") for i in range(count))]
    model = dict(tree["model"])
    if isinstance(model["vocab"], list):
        scores = dict(enumerate(score for _, score in model["vocab"]))
        least = min(scores.values())  # more would make it likelier, less would change what is unknown
        model["vocab"] = [[token, scores.get(i - shift, least)] for i, token in enumerate(ordered)]
        model["unk_id"] = model.get("unk_id") if model.get("unk_id") is None else UNK
    else:
        model["vocab"] = {token: i for i, token in enumerate(ordered)}
        model["unk_token"] = model.get("unk_token") and SPECIAL[UNK]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIAL)]
    for token in tree.get("added_tokens") or []:
        added.append(token | {"id": token["id"] + shift, "content": names[token["id"]]})
    return tree | plain | {"model": model, "added_tokens": added}


def specials(given: Given, form: Form, reading: Reading) -> tuple[list[int | None], bool]:
    """Which entries are the model's own <pad>, <unk>, <bos> and <eos>, and whether its texts begin with <bos>."""

    def entry(name: str) -> int | None:
        value = given.tree.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        return value if isinstance(value, int) and 0 <= value < reading.vocab else None

    try:
        pad, unk = entry("pad"), unknown(given.tokenizer)
        max(entries(given.tokenizer).values())
        tokenizer = tokenizer_of(given.tokenizer | {"truncation": None, "padding": None}, given.where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{given.where}: the tokenizer has no model with a vocabulary ({error!r}).") from error
    frame = list(tokenizer.encode("").ids)
    eos, bos = entry("eos"), entry("bos")
    if form.kind == "language":
        begin = bool(frame) and frame[0] != eos
        return [pad, unk, frame[0] if begin else bos, eos], begin
    if form.kind == "encoder":
        if len(frame) != 2:
            raise DataError(
                f"{given.where}: the tokenizer frames texts with {len(frame)} entries, expected 2 ([CLS] and [SEP])."
            )
        return [pad, unk, *frame], True
    if frame not in ([], [eos]) or eos is None:
        names = " ".join(str(tokenizer.id_to_token(i)) for i in frame)
        raise DataError(f"{given.where}: the tokenizer frames texts with {names}, expected only the end, eos_token_id.")
    return [pad, unk, entry("decoder_start"), eos], False
