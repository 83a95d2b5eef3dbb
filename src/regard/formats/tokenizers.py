"""Their tokenizers -> our vocabularies. Entries are moved by four; in front of them come <pad> <unk> <bos> <eos>."""

import base64
import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from regard.data.vocabulary import SPECIAL, UNK
from regard.errors import DataError
from regard.formats.architectures import Layout, Reading, Tree
from regard.training.checkpoint import Tensors

GROWTH = 1000
"""How many times as long a tokenizer may make a text, or what it frames or decodes."""


class Given(NamedTuple):
    """A model as it came."""

    where: Path
    tree: Tree  # config.json, with what generation_config.json changes.
    tensors: Tensors
    tokenizer: Tree


@contextlib.contextmanager
def name_failure(where: Path, what: str) -> Iterator[None]:
    """A DataError of whatever goes wrong in the library: it raises plain Exception, and a panic of its Rust code is not
    even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, DataError):
        raise
    except BaseException as error:
        raise DataError(f"{where}: the tokenizer {what}: {error}.") from error


def make_tokenizer(tree: Tree, where: Path) -> Tokenizer:
    """A tokenizer of its JSON, if it does not make texts much longer; that is asked before it does anything."""
    with name_failure(where, "cannot be used"):
        for part in ("normalizer", "post_processor", "decoder"):
            if (times := find_growth(tree.get(part))) > GROWTH:
                longer = f"may make a text {times:,.0f} times as long ({part})"
                raise DataError(f"{where}: the tokenizer {longer}, at most {GROWTH:,} times is allowed.")
        return Tokenizer.from_str(json.dumps(tree))


def find_growth(step: Any) -> float:
    """How many times as long a text, with one more letter for its end, can become at most in a step of a tokenizer's
    JSON and those inside of it. What puts in no text of the file's own, as Unicode's normal forms, counts as 1."""
    match step:
        case {"type": "Sequence", **inside}:
            parts = (part for value in inside.values() if isinstance(value, list) for part in value)
            return math.prod(map(find_growth, parts), start=1.0)
        case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)} if found:
            return max(1.0, len(content) / len(found))
        case {"type": "Replace", "content": str(content)} | {"type": "Prepend", "prepend": str(content)}:
            return 1.0 + len(content)  # a regular expression may match nothing, before each letter and at the end
        case {"type": "Precompiled", "precompiled_charsmap": str(code)}:
            table = base64.b64decode(code)  # the size of a trie, the trie, and what letters turn into
            return float(max(map(len, table[4 + int.from_bytes(table[:4], "little") :].split(b"\0"))))
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(known)}:
            named = (known[piece["SpecialToken"]["id"]]["ids"] for piece in pieces if "SpecialToken" in piece)
            return float(len(pieces) + sum(map(len, named)))
    return 1.0


def list_entries(tokenizer: Tree) -> dict[str, int]:
    """Every entry of a tokenizer's JSON and its id, also those that were added."""
    vocab = tokenizer["model"]["vocab"]
    known = {token: i for i, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else dict(vocab)
    return known | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}


def is_ours(tokenizer: Tree, count: int, special: Sequence[int | None]) -> bool:
    """Whether a vocabulary begins as ours do and has all `count` entries, and the model's `special` ones are those."""
    known = list_entries(tokenizer)
    named = [known.get(token) for token in SPECIAL] == list(range(len(SPECIAL)))
    return named and len(known) == count and all(entry in (None, i) for i, entry in enumerate(special))


def find_unknown(tokenizer: Tree) -> int | None:
    """The entry for what is unknown, if the tokenizer has one."""
    model = tokenizer["model"]
    if model["type"] == "Unigram":
        found: int | None = model.get("unk_id")
        return found
    return list_entries(tokenizer).get(model.get("unk_token"))


def move_entries(given: Given, count: int, special: Sequence[int | None]) -> Tree:
    """The tokenizer's JSON with our special entries at 0 to 3 and the others behind them, `count` in all: what the
    embedding has a row for and the tokenizer no entry gets one, never used. Texts are framed by us, not by it."""
    tree, known = given.tokenizer, list_entries(given.tokenizer)
    plain = {"truncation": None, "padding": None, "post_processor": None}
    if max(known.values()) >= count:
        raise DataError(f"{given.where}: the tokenizer has {max(known.values()) + 1:,} entries, the model {count:,}.")
    if is_ours(tree, count, special):
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


def find_specials(given: Given, layout: Layout, reading: Reading) -> tuple[list[int | None], bool]:
    """Which entries are the model's own <pad>, <unk>, <bos> and <eos>, and whether its texts begin with <bos>."""

    def entry(name: str) -> int | None:
        value = given.tree.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) and value else value
        if value is not None and type(value) is not int:
            raise DataError(f"{given.where}: {name}_token_id is {value!r}, expected the number of an entry.")
        return value if value is not None and 0 <= value < reading.vocab else None

    try:
        pad, unk = entry("pad"), find_unknown(given.tokenizer)
        marked = {token["id"] for token in given.tokenizer.get("added_tokens") or [] if token.get("special")}
        max(list_entries(given.tokenizer).values())
        tokenizer = make_tokenizer(given.tokenizer | {"truncation": None, "padding": None}, given.where)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{given.where}: the tokenizer has no model with a vocabulary ({error!r}).") from error
    lead, tail = find_frame(tokenizer, given.where)
    bos, eos, start = entry("bos"), entry("eos"), entry("decoder_start")
    pad = pad if pad in marked | {unk, eos, start} else None  # some configurations name an ordinary word
    before, behind = (" ".join(str(tokenizer.id_to_token(i)) for i in part) for part in (lead, tail))
    refusal = f"{given.where}: the tokenizer puts {before!r} before a text and {behind!r} behind it, expected "
    if layout.architecture == "decoder":
        if len(lead) > 1 or tail:
            raise DataError(f"{refusal}at most one entry before it and none behind it.")
        return [pad, unk, lead[0] if lead else bos, eos], bool(lead)
    if layout.architecture == "encoder":
        if len(lead) != 1 or len(tail) != 1:
            raise DataError(f"{refusal}one entry before it and one behind it ([CLS] and [SEP]).")
        return [pad, unk, *lead, *tail], True
    if eos is None or lead or tail != [eos]:
        raise DataError(f"{refusal}only the end behind it (eos_token_id, which is {eos}).")
    if start is None:
        raise DataError(f"{given.where}: config.json does not say which entry decoder_start_token_id is. Add it.")
    if (forced := given.tree.get("forced_bos_token_id")) is not None:
        raise DataError(f"{given.where}: outputs must begin with entry {forced} (forced_bos_token_id): not supported.")
    return [pad, unk, start, eos], False


def find_frame(tokenizer: Tokenizer, where: Path) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind every text."""
    with name_failure(where, "cannot read letters and digits"):
        found = tokenizer.encode("a the 1 2 3 x y z")
        tokenizer.decode(found.ids)
    inside = [place for place, added in enumerate(found.special_tokens_mask) if not added]
    if not found.ids:
        return [], []
    if not inside:
        raise DataError(f"{where}: the tokenizer puts entries around a text, but makes none of letters and digits.")
    return list(found.ids[: inside[0]]), list(found.ids[inside[-1] + 1 :])
