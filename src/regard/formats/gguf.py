"""GGUF files, as llama.cpp reads them, in the words of transformers: settings, tensors and a tokenizer."""

import math
import os
import struct
import tomllib
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from regard.errors import DataError

TABLES = tomllib.loads(Path(__file__).with_name("gguf.toml").read_text("utf-8"))
BLOCK: dict[str, str] = TABLES["block"]
ENDS: dict[str, str] = TABLES["ends"]
CONTROL, USER = 3, 4
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the other types of values."""
MOST = 2**22
"""Entries of all arrays that are read: each becomes an object of Python's, and no vocabulary has so many."""
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError, ArithmeticError, MemoryError)
"""What reading a damaged file raises."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """The settings as in config.json, the tensors in float32, and the tokenizer's JSON."""
    try:
        import gguf
    except ImportError as error:
        raise DataError(f"{path} needs a package that is not installed: pip install gguf") from error
    try:
        check_header(path, gguf.GGML_QUANT_SIZES)
        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        tree, tensors = settings(path, facts), {}
        for one in reader.tensors:
            name = renamed(path, one.name)
            tensor = torch.tensor(gguf.quants.dequantize(one.data, one.tensor_type)).float()
            if ".q_proj." in name or ".k_proj." in name:
                tensor = untwisted(tensor, tree["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
            tensors[name] = tensor
        return tree | {"tie_word_embeddings": "lm_head.weight" not in tensors}, tensors, tokenizer(path, facts)
    except DAMAGE as error:
        raise DataError(f"{path} is damaged, cut short, or no GGUF file: {error!r}.") from error


class Walker:
    """Walks over a file that says itself how long its parts are; nothing is read that is not in it."""

    STRING, ARRAY = 8, 9

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.order, self.entries = file, os.fstat(file.fileno()).st_size, "<", 0

    def number(self, form: str) -> int:
        """The next number, of a form in the words of `struct`."""
        data = self.file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise ValueError("it ends too early")
        found: int = struct.unpack(self.order + form, data)[0]
        return found

    def skip(self, count: int) -> None:
        """Go on by so many bytes."""
        if count > self.size - self.file.tell():
            raise ValueError(f"a part of {count:,} bytes is longer than what is left of the file")
        self.file.seek(count, os.SEEK_CUR)

    def values(self, kind: int, count: int = 1) -> None:
        """Skip values of one type."""
        match kind:
            case Walker.STRING:
                for _ in range(count):
                    self.skip(self.number("Q"))
            case Walker.ARRAY:
                for _ in range(count):
                    inside, many = self.number("I"), self.number("Q")
                    self.entries += many
                    if self.entries > MOST:
                        raise ValueError(f"its arrays have {self.entries:,} entries, at most {MOST:,} are read")
                    self.values(inside, many)
            case _:
                self.skip(count * SIZES[kind])


def check_header(path: Path, blocks: dict[Any, tuple[int, int]]) -> None:
    """Refuse a file whose header promises more than the file holds, before memory is taken for it. `blocks` has, by
    type of tensors, how many numbers a block holds and how many bytes it takes."""
    with path.open("rb") as file:
        walk = Walker(file)
        walk.skip(4)
        if walk.number("I") & 0xFFFF == 0:
            walk.order = ">"
        tensors, facts = walk.number("Q"), walk.number("Q")
        for _ in range(facts):
            walk.values(Walker.STRING)
            walk.values(walk.number("I"))
        total = 0
        for _ in range(tensors):
            walk.values(Walker.STRING)
            if (dimensions := walk.number("I")) > 4:
                raise ValueError(f"a tensor has {dimensions:,} dimensions, at most 4 are known")
            shape = [walk.number("Q") for _ in range(dimensions)]
            numbers, taken = blocks[walk.number("I")]
            total += math.prod(shape) * taken // numbers
            walk.skip(8)
        if total > walk.size:
            raise ValueError(f"its tensors would take {total:,} bytes, the file has {walk.size:,}")


def settings(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The settings in the words of config.json."""
    kind = facts.get("general.architecture")
    if kind != "llama":
        raise DataError(f"{path}: the architecture {kind!r} is not known in GGUF files. Known: llama.")

    def fact(name: str, *default: Any) -> Any:
        if f"llama.{name}" not in facts and not default:
            raise DataError(f"{path} does not say llama.{name}.")
        return facts.get(f"llama.{name}", *default)

    if fact("rope.scaling.type", "none") != "none":
        raise DataError(f"{path}: rotary positions are scaled ({fact('rope.scaling.type')}); only unscaled are known.")
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        if fact(name, 1) not in (0, 1):  # 0 is none, too
            raise DataError(f"{path}: rotary positions are scaled ({name} is {fact(name)}); only unscaled are known.")
    tree = {ours: fact(*theirs) for ours, theirs in TABLES["settings"].items()}
    tree["num_key_value_heads"] = fact("attention.head_count_kv", tree["num_attention_heads"])
    tree |= {name: facts.get(f"tokenizer.ggml.{theirs}") for name, theirs in TABLES["entries"].items()}
    size = len(facts.get("tokenizer.ggml.tokens", ()))
    return tree | {"model_type": "llama", "head_dim": fact("rope.dimension_count", None), "vocab_size": size}


def renamed(path: Path, name: str) -> str:
    """A tensor's name in transformers."""
    first, *rest = name.split(".")
    if first == "blk" and len(rest) == 3 and rest[1] in BLOCK:
        return f"model.layers.{rest[0]}.{BLOCK[rest[1]]}.{rest[2]}"
    if first in ENDS and len(rest) == 1:
        return f"{ENDS[first]}.{rest[0]}"
    raise DataError(f"{path} holds the tensor {name}, which has no place here.")


def untwisted(tensor: Tensor, heads: int) -> Tensor:
    """The rows of a query or key map, ordered for pairs (i, i + half) of a head: llama.cpp's pairs are neighbours."""
    if tensor.shape[0] % (2 * heads):
        return tensor  # of a wrong shape, which is said later
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def tokenizer(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's JSON, of the entries and merges that the file holds."""
    kind, cut = facts.get("tokenizer.ggml.model"), facts.get("tokenizer.ggml.pre")
    if kind != "gpt2" or cut not in TABLES["splits"]:
        known = ", ".join(TABLES["splits"])
        raise DataError(f"{path}: the tokenizer is {kind!r}, {cut!r}; known is 'gpt2' with one of: {known}.")
    tokens = facts["tokenizer.ggml.tokens"]
    types = facts.get("tokenizer.ggml.token_type", [1] * len(tokens))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": type_ == CONTROL, **flags}
        for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, USER)
    ]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]]
    tree: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": TABLES["splits"][cut]},
        "decoder": TABLES["decoder"],
        "model": {"type": "BPE", "ignore_merges": cut == "llama-bpe", "vocab": vocab, "merges": merges},
    }
    if facts.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe"):  # as llama.cpp has it where a file is silent
        begin = facts.get("tokenizer.ggml.bos_token_id")
        if not isinstance(begin, int) or not 0 <= begin < len(tokens):
            raise DataError(f"{path}: add_bos_token is set, but bos_token_id is {begin}, expected an entry.")
        tree["post_processor"] = framing([tokens[begin]], [], {tokens[begin]: begin})
    return tree


def framing(lead: list[str], tail: list[str], ids: dict[str, int]) -> dict[str, Any]:
    """A tokenizer's post-processor that puts entries before and after every text."""
    before, behind = ([{"SpecialToken": {"id": token, "type_id": 0}} for token in part] for part in (lead, tail))
    first, second = ({"Sequence": {"id": text, "type_id": 0}} for text in "AB")
    single = [*before, first, *behind]
    known = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()}
    pair = [*single, second, *behind]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": known}
