"""How transformers names and shapes what we have too (architectures.toml), and a reading of config.json for each of its
architectures. The tables serve both ways, in and out."""

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError

Tree = dict[str, Any]


class Layout(NamedTuple):
    """How one architecture names and stores its tensors. Names are without what stands before all of them."""

    architecture: str  # of our model: encoder, decoder or encoder-decoder
    prefix: str
    layer: str  # theirs, before a layer's number; of two stacks, `{stack}` stands for encoder or decoder
    blocks: dict[str, dict[str, list[str]]]  # by our stack: a module of ours -> those of theirs that make it
    ends: dict[str, str]  # modules outside of blocks
    transposed: bool = False  # whether matrices are stored as (inputs, outputs)
    embedding: str = "embed_tokens"
    output: str = "lm_head"
    by_head: bool = False  # whether a joint projection has query, key and value of the first head, then of the second
    ignored: str = "(?!)"  # what of their tensors has no meaning here, as a regular expression


TABLES = tomllib.loads(Path(__file__).with_name("architectures.toml").read_text("utf-8"))
ACTIVATIONS: dict[str, str] = TABLES["activations"]
SETTINGS: dict[str, dict[str, list[Any]]] = TABLES["settings"]
LAYOUTS: dict[str, Layout] = {}
for name, table in TABLES["layouts"].items():
    LAYOUTS[name] = LAYOUTS[table.pop("like")]._replace(**table) if "like" in table else Layout(**table)
COPIES = r"(lm_head|(en|de)coder\.embed_tokens)\.weight"
"""Copies of the one embedding."""


def their_names(layout: Layout, name: str) -> tuple[str, ...] | None:
    """The names in transformers of one of our tensors; None for embeddings, positions and output."""
    place, _, leaf = name.rpartition(".")
    if found := re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", place):
        stack, number, part = found.groups()
        before = f"{layout.layer.format(stack=stack)}{number}."
        return tuple(f"{before}{other}.{leaf}" for other in layout.blocks[stack][part])
    return (f"{layout.ends[place]}.{leaf}",) if place in layout.ends else None


def join_tensors(layout: Layout, parts: list[Tensor], heads: int) -> Tensor:
    """Their tensors as one of ours; `heads` is 1 but for maps of query, key and value."""
    whole = torch.cat([part.t() if layout.transposed and part.dim() == 2 else part for part in parts])
    if layout.by_head and heads > 1:
        whole = whole.view(heads, 3, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
    return whole.contiguous()


def split_tensor(layout: Layout, whole: Tensor, rows: list[int], heads: int) -> list[Tensor]:
    """One of our tensors as theirs, of so many rows each: the reverse of `join_tensors`."""
    if layout.by_head and heads > 1:
        whole = whole.view(3, heads, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
    parts = torch.split(whole, rows)
    return [(part.t() if layout.transposed and part.dim() == 2 else part).contiguous() for part in parts]


def count_rows(names: Sequence[str], count: int, heads: int, kv_heads: int | None) -> list[int]:
    """How the rows of one of our tensors fall to several of theirs."""
    if len(names) == 1:
        return [count]
    groups = (heads, kv_heads or heads, kv_heads or heads)
    return [count // sum(groups) * group for group in groups]


class Reading(NamedTuple):
    """What config.json says."""

    model: Tree  # our settings of the model
    vocab: int
    context: int  # positions
    no_bias: tuple[str, ...] = ()  # their modules that have none, where ours have


def read_number(tree: Tree, name: str, default: float | None = None) -> Any:
    """A number of config.json."""
    value = default if tree.get(name) is None else tree[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise DataError(f"config.json: {name} is {value!r}, expected a number.")
    return value


def read_group(tree: Tree, name: str) -> Tree:
    """Settings inside of config.json; none, if they are not there."""
    value = tree.get(name) or {}
    if not isinstance(value, dict):
        raise DataError(f"config.json: {name} is {value!r}, expected an object.")
    return value


def require(tree: Tree, **allowed: Any) -> None:
    """Say which setting has a value that we have no equal for."""
    for name, value in allowed.items():
        if name in tree and tree[name] not in (value, None):
            raise DataError(f"config.json: {name} is {tree[name]!r}; only {value!r} has an equal here.")


def read_activation(tree: Tree, name: str, default: str) -> str:
    """Ours, by its name in config.json."""
    value = tree.get(name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise DataError(f"config.json: {name} is {value!r}; known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


def read_settings(tree: Tree, kind: str, **more: Any) -> Tree:
    """Our settings of a model, of those that SETTINGS names and others."""
    readers = {"activation": read_activation}
    return {ours: readers.get(ours, read_number)(tree, *theirs) for ours, theirs in SETTINGS[kind].items()} | more


def read_bert(tree: Tree) -> Reading:
    """BERT, MiniLM."""
    require(tree, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    model = read_settings(tree, "bert", norm="post", positions="learned", embedding_scale=False, embedding_norm=True)
    return Reading(model, read_number(tree, "vocab_size"), read_number(tree, "max_position_embeddings", 512))


def read_gpt2(tree: Tree) -> Reading:
    """GPT-2."""
    require(tree, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    tied = bool(tree.get("tie_word_embeddings", True))
    model = read_settings(tree, "gpt2", positions="learned", embedding_scale=False, tie_embeddings=tied)
    model["feedforward"] = model["feedforward"] or 4 * model["size"]
    return Reading(model, read_number(tree, "vocab_size"), read_number(tree, "n_positions", 1024))


def read_rotary_base(tree: Tree, name: str = "rope_theta") -> float:
    """The base of rotary positions that are not scaled."""
    rope = read_group(tree, "rope_scaling") or read_group(tree, "rope_parameters")  # the older name wins
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise DataError(f"config.json: rotary positions are scaled ({kind}); only unscaled ones are known.")
    return float(read_number({name: rope.get("rope_theta", tree.get(name))}, name, 10_000.0))


def read_neox(tree: Tree) -> Reading:
    """GPT-NeoX whose parts follow each other."""
    require(tree, use_parallel_residual=False, attention_bias=True)
    rope = read_group(tree, "rope_scaling") or read_group(tree, "rope_parameters")
    require({"rotary_pct": rope.get("partial_rotary_factor", tree.get("rotary_pct", 0.25))}, rotary_pct=1.0)
    if "use_parallel_residual" not in tree:
        raise DataError("config.json: use_parallel_residual is not given, that is true; only false has an equal here.")
    base, tied = read_rotary_base(tree, "rotary_emb_base"), bool(tree.get("tie_word_embeddings"))
    rotary = {"positions": "rotary", "rotary_base": base}
    model = read_settings(tree, "gpt_neox", **rotary, embedding_scale=False, tie_embeddings=tied)
    return Reading(model, read_number(tree, "vocab_size"), read_number(tree, "max_position_embeddings", 2048))


def read_llama(tree: Tree) -> Reading:
    """Llama, Mistral, Qwen2."""
    size, heads = read_number(tree, "hidden_size"), read_number(tree, "num_attention_heads")
    context = read_number(tree, "max_position_embeddings", 2048)
    require(tree, head_dim=size // max(heads, 1))
    if tree.get("use_sliding_window", True):  # within the window, there is no difference
        context = min(context, read_number(tree, "sliding_window", context))
    bias = dict.fromkeys(("q_proj", "k_proj", "v_proj"), tree.get("attention_bias", tree["model_type"] == "qwen2"))
    bias |= dict.fromkeys(("gate_proj", "up_proj", "down_proj"), tree.get("mlp_bias"))
    bias["o_proj"] = tree.get("attention_bias")
    model = read_settings(
        tree, "llama", kv_heads=read_number(tree, "num_key_value_heads", heads), norm_kind="rms", gated=True,
        positions="rotary", rotary_base=read_rotary_base(tree), bias=any(bias.values()), embedding_scale=False,
        dropout=0.0, tie_embeddings=bool(tree.get("tie_word_embeddings")),
    )  # fmt: skip
    absent = tuple(name for name, given in bias.items() if not given)
    return Reading(model, read_number(tree, "vocab_size"), context, absent)


def read_seq2seq(tree: Tree) -> Reading:
    """Marian, Pegasus, BART, mBART."""
    kind = tree["model_type"]
    for one, two in (("encoder_attention_heads", "decoder_attention_heads"), ("encoder_ffn_dim", "decoder_ffn_dim")):
        if tree.get(one) != tree.get(two):
            raise DataError(f"config.json: {one} and {two} are not the same, which has no equal here.")
    vocab = read_number(tree, "vocab_size")
    require(tree, share_encoder_decoder_embeddings=True, decoder_vocab_size=vocab, tie_word_embeddings=True)
    model = read_settings(
        tree, "seq2seq", norm="pre" if kind in ("pegasus", "mbart") else "post", positions="learned",
        embedding_scale=bool(tree.get("scale_embedding", False)), embedding_norm=kind in ("bart", "mbart"),
    )  # fmt: skip
    return Reading(model, vocab, read_number(tree, "max_position_embeddings", 1024))


READERS: dict[str, Callable[[Tree], Reading]] = {
    "bert": read_bert,
    "gpt2": read_gpt2,
    "gpt_neox": read_neox,
    **dict.fromkeys(("llama", "mistral", "qwen2"), read_llama),
    **dict.fromkeys(("marian", "pegasus", "bart", "mbart"), read_seq2seq),
}


def marian_positions(count: int, size: int) -> Tensor:
    """Marian's and Pegasus' positions (count, size): as ours, but all sines come before all cosines."""
    rates = torch.exp(torch.arange(0, size, 2, dtype=torch.float64) * (-math.log(10_000) / size))
    angles = torch.arange(count, dtype=torch.float64)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()[:, : size // 2]], dim=1).float()
