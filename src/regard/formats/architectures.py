"""How transformers names and shapes what we have too: a table of tensors and a reading of config.json for each of its
architectures. The tables serve both ways, in and out."""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError

Tree = dict[str, Any]
Names = dict[str, tuple[str, ...]]
"""A part of a block -> the parts of theirs that, on top of each other, make it."""

ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_new": "gelu tanh", "gelu_pytorch_tanh": "gelu tanh", "gelu_fast": "gelu tanh",
    "silu": "silu", "swish": "silu",
}  # fmt: skip
"""Theirs -> ours."""


class Form(NamedTuple):
    """One architecture. Names are without what stands before all of them (`prefix`)."""

    kind: str
    """Of our model."""
    prefix: str
    layer: str
    """Theirs, before a layer's number; of two stacks, `{stack}` stands for encoder or decoder."""
    blocks: dict[str, Names]
    """By our stack: encoder, decoder."""
    ends: dict[str, str]
    """Modules outside of blocks."""
    turned: bool = False
    """Whether matrices are stored as (inputs, outputs)."""
    by_head: bool = False
    """Whether the joint map holds query, key and value of the first head, then of the second, ..."""
    ignored: str = "(?!)"
    """What of their tensors has no meaning here, as a regular expression."""


def attention(ours: str, theirs: str, *parts: str) -> Names:
    """Maps of query, key and value, and the output."""
    *maps, output = (f"{theirs}.{part}" for part in parts)
    return {f"{ours}.maps": tuple(maps), f"{ours}.output": (output,)}


BERT: Names = {
    **attention("self_attention", "attention", "self.query", "self.key", "self.value", "output.dense"),
    "residuals.0.norm": ("attention.output.LayerNorm",),
    "feedforward.widen": ("intermediate.dense",),
    "feedforward.narrow": ("output.dense",),
    "residuals.1.norm": ("output.LayerNorm",),
}
GPT2: Names = {
    **attention("self_attention", "attn", "c_attn", "c_proj"),
    "residuals.0.norm": ("ln_1",),
    "feedforward.widen": ("mlp.c_fc",),
    "feedforward.narrow": ("mlp.c_proj",),
    "residuals.1.norm": ("ln_2",),
}
NEOX: Names = {
    **attention("self_attention", "attention", "query_key_value", "dense"),
    "residuals.0.norm": ("input_layernorm",),
    "feedforward.widen": ("mlp.dense_h_to_4h",),
    "feedforward.narrow": ("mlp.dense_4h_to_h",),
    "residuals.1.norm": ("post_attention_layernorm",),
}
LLAMA: Names = {
    **attention("self_attention", "self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
    "residuals.0.norm": ("input_layernorm",),
    "feedforward.gate": ("mlp.gate_proj",),
    "feedforward.widen": ("mlp.up_proj",),
    "feedforward.narrow": ("mlp.down_proj",),
    "residuals.1.norm": ("post_attention_layernorm",),
}
READ: Names = {
    **attention("self_attention", "self_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    "residuals.0.norm": ("self_attn_layer_norm",),
    "feedforward.widen": ("fc1",),
    "feedforward.narrow": ("fc2",),
    "residuals.1.norm": ("final_layer_norm",),
}
WRITE: Names = {
    **READ,
    **attention("cross_attention", "encoder_attn", "q_proj", "k_proj", "v_proj", "out_proj"),
    "residuals.1.norm": ("encoder_attn_layer_norm",),
    "residuals.2.norm": ("final_layer_norm",),
}
LAST = {f"{stack}.norm": f"{stack}.layer_norm" for stack in ("encoder", "decoder")}
FIRST = {f"{stack}.embedding_norm": f"{stack}.layernorm_embedding" for stack in ("encoder", "decoder")}
SEQ2SEQ = Form("transformer", "model.", "{stack}.layers.", {"encoder": READ, "decoder": WRITE}, {})
COPIES = r"(lm_head|(en|de)coder\.embed_tokens)\.weight"
"""Copies of the one embedding."""
FORMS = {
    "bert": Form(
        "encoder", "bert.", "encoder.layer.", {"encoder": BERT}, {"encoder.embedding_norm": "embeddings.LayerNorm"},
        ignored=r"pooler\..*|cls\..*|embeddings\.position_ids",
    ),
    "gpt2": Form(
        "language", "transformer.", "h.", {"decoder": GPT2}, {"decoder.norm": "ln_f"}, turned=True,
        ignored=r"h\.\d+\.attn\.(masked_)?bias|lm_head\.weight",
    ),
    "gpt_neox": Form(
        "language", "gpt_neox.", "layers.", {"decoder": NEOX}, {"decoder.norm": "final_layer_norm"}, by_head=True,
        ignored=r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|embed_out\.weight",
    ),
    "llama": Form(
        "language", "model.", "layers.", {"decoder": LLAMA}, {"decoder.norm": "norm"},
        ignored=r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq|lm_head\.weight",
    ),
    "marian": SEQ2SEQ._replace(ignored=rf"{COPIES}|(en|de)coder\.embed_positions\.weight"),
    "pegasus": SEQ2SEQ._replace(ends=LAST, ignored=rf"{COPIES}|(en|de)coder\.embed_positions\.weight"),
    "bart": SEQ2SEQ._replace(ends=FIRST, ignored=COPIES),
    "mbart": SEQ2SEQ._replace(ends=FIRST | LAST, ignored=COPIES),
}  # fmt: skip
FORMS |= {"mistral": FORMS["llama"], "qwen2": FORMS["llama"]}


def theirs(form: Form, name: str) -> tuple[str, ...] | None:
    """The names in transformers of one of our tensors; None for embeddings, positions and output."""
    place, _, leaf = name.rpartition(".")
    if found := re.fullmatch(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)", place):
        stack, number, part = found.groups()
        before = f"{form.layer.format(stack=stack)}{number}."
        return tuple(f"{before}{other}.{leaf}" for other in form.blocks[stack][part])
    return (f"{form.ends[place]}.{leaf}",) if place in form.ends else None


def together(form: Form, parts: list[Tensor], heads: int) -> Tensor:
    """Their tensors as one of ours; `heads` is 1 but for maps of query, key and value."""
    parts = [part.t() if form.turned and part.dim() == 2 else part for part in parts]
    whole = torch.cat(parts)
    if form.by_head and heads > 1:
        whole = whole.view(heads, 3, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
    return whole.contiguous()


def apart(form: Form, whole: Tensor, rows: list[int], heads: int) -> list[Tensor]:
    """One of our tensors as theirs, of so many rows each: the reverse of `together`."""
    if form.by_head and heads > 1:
        whole = whole.view(3, heads, -1, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)
    parts = torch.split(whole, rows)
    return [(part.t() if form.turned and part.dim() == 2 else part).contiguous() for part in parts]


def rows(name: str, names: tuple[str, ...], count: int, heads: int, key_heads: int | None) -> list[int]:
    """How the rows of one of our tensors fall to several of theirs."""
    if len(names) == 1:
        return [count]
    groups = (heads, key_heads or heads, key_heads or heads)
    return [count // sum(groups) * group for group in groups]


# --- config.json -----------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """What config.json says."""

    model: Tree
    """Our settings of the model."""
    vocab: int
    context: int
    """Positions."""
    no_bias: tuple[str, ...] = ()
    """Their modules that have none, where ours have."""


def number(tree: Tree, name: str, default: float | None = None) -> Any:
    """A number of config.json."""
    value = tree.get(name, default)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise DataError(f"config.json: {name} is {value!r}, expected a number.")
    return value


def group(tree: Tree, name: str) -> Tree:
    """Settings inside of config.json; none, if they are not there."""
    value = tree.get(name) or {}
    if not isinstance(value, dict):
        raise DataError(f"config.json: {name} is {value!r}, expected an object.")
    return value


def only(tree: Tree, **allowed: Any) -> None:
    """Say which setting has a value that we have no equal for."""
    for name, value in allowed.items():
        if name in tree and tree[name] not in (value, None):
            raise DataError(f"config.json: {name} is {tree[name]!r}; only {value!r} has an equal here.")


def activation(tree: Tree, name: str, default: str) -> str:
    """Ours, by its name in config.json."""
    value = tree.get(name, default)
    if not isinstance(value, str) or value not in ACTIVATIONS:
        raise DataError(f"config.json: {name} is {value!r}; known: {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[value]


COMMON = {
    "size": ("hidden_size",), "feedforward": ("intermediate_size",), "heads": ("num_attention_heads",),
    "layers": ("num_hidden_layers",), "activation": ("hidden_act", "gelu"),
}  # fmt: skip
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "bert": COMMON | {"epsilon": ("layer_norm_eps", 1e-12), "dropout": ("hidden_dropout_prob", 0.1)},
    "gpt2": {
        "size": ("n_embd",), "feedforward": ("n_inner", 0), "heads": ("n_head",), "layers": ("n_layer",),
        "activation": ("activation_function", "gelu_new"), "epsilon": ("layer_norm_epsilon", 1e-5),
        "dropout": ("resid_pdrop", 0.1),
    },
    "gpt_neox": COMMON | {"epsilon": ("layer_norm_eps", 1e-5), "dropout": ("hidden_dropout", 0.0)},
    "llama": COMMON | {"activation": ("hidden_act", "silu"), "epsilon": ("rms_norm_eps", 1e-6)},
    "seq2seq": {
        "size": ("d_model",), "feedforward": ("encoder_ffn_dim",), "heads": ("encoder_attention_heads",),
        "encoder_layers": ("encoder_layers",), "decoder_layers": ("decoder_layers",),
        "activation": ("activation_function", "gelu"), "dropout": ("dropout", 0.1),
    },
}  # fmt: skip
"""Our settings -> theirs, and their default if they have one."""


def named(tree: Tree, kind: str, **more: Any) -> Tree:
    """Our settings of a model, of those that SETTINGS names and others."""
    names = SETTINGS[kind].items()
    return {ours: (activation if ours == "activation" else number)(tree, *theirs) for ours, theirs in names} | more


def read_bert(tree: Tree) -> Reading:
    """BERT, MiniLM."""
    only(tree, position_embedding_type="absolute", is_decoder=False, add_cross_attention=False)
    model = named(tree, "bert", norm="post", positions="learned", embedding_scale=False, embedding_norm=True)
    return Reading(model, number(tree, "vocab_size"), number(tree, "max_position_embeddings", 512))


def read_gpt2(tree: Tree) -> Reading:
    """GPT-2."""
    only(tree, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    model = named(tree, "gpt2", positions="learned", embedding_scale=False, tied=tied(tree, True))
    model["feedforward"] = model["feedforward"] or 4 * model["size"]
    return Reading(model, number(tree, "vocab_size"), number(tree, "n_positions", 1024))


def tied(tree: Tree, default: bool = False) -> bool:
    """Whether the output is the embedding."""
    return bool(tree.get("tie_word_embeddings", default))


def rotary_base(tree: Tree, name: str = "rope_theta") -> float:
    """The base of rotary positions that are not scaled."""
    rope = group(tree, "rope_scaling") or group(tree, "rope_parameters")  # the older name wins
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise DataError(f"config.json: rotary positions are scaled ({kind}); only unscaled ones are known.")
    return float(number({name: rope.get("rope_theta", tree.get(name))}, name, 10_000.0))


def read_neox(tree: Tree) -> Reading:
    """GPT-NeoX whose parts follow each other."""
    only(tree, use_parallel_residual=False, attention_bias=True)
    rope = group(tree, "rope_scaling") or group(tree, "rope_parameters")
    only({"rotary_pct": rope.get("partial_rotary_factor", tree.get("rotary_pct", 0.25))}, rotary_pct=1.0)
    if "use_parallel_residual" not in tree:
        raise DataError("config.json: use_parallel_residual is not given, that is true; only false has an equal here.")
    base = rotary_base(tree, "rotary_emb_base")
    model = named(tree, "gpt_neox", positions="rotary", rotary_base=base, embedding_scale=False, tied=tied(tree))
    return Reading(model, number(tree, "vocab_size"), number(tree, "max_position_embeddings", 2048))


def read_llama(tree: Tree) -> Reading:
    """Llama, Mistral, Qwen2."""
    size, heads = number(tree, "hidden_size"), number(tree, "num_attention_heads")
    context = number(tree, "max_position_embeddings", 2048)
    only(tree, head_dim=size // max(heads, 1))
    if tree.get("use_sliding_window", True):  # within the window, there is no difference
        context = min(context, number(tree, "sliding_window", context))
    kind = tree["model_type"]
    bias = {"q_proj": bool(tree.get("attention_bias", kind == "qwen2")), "o_proj": bool(tree.get("attention_bias"))}
    bias["mlp"] = bool(tree.get("mlp_bias"))
    absent = ("o_proj",) * (not bias["o_proj"]) + ("gate_proj", "up_proj", "down_proj") * (not bias["mlp"])
    model = named(
        tree, "llama", key_heads=number(tree, "num_key_value_heads", heads), norm_kind="rms", gated=True,
        positions="rotary", rotary_base=rotary_base(tree), bias=any(bias.values()), embedding_scale=False, dropout=0.0,
        tied=tied(tree),
    )  # fmt: skip
    absent += ("q_proj", "k_proj", "v_proj") * (not bias["q_proj"])
    return Reading(model, number(tree, "vocab_size"), context, absent)


def read_seq2seq(tree: Tree) -> Reading:
    """Marian, Pegasus, BART, mBART."""
    kind = tree["model_type"]
    for name in ("attention_heads", "ffn_dim"):
        if tree.get(f"encoder_{name}") != tree.get(f"decoder_{name}"):
            raise DataError(
                f"config.json: encoder_{name} and decoder_{name} are not the same, which has no equal here."
            )
    vocab = number(tree, "vocab_size")
    only(tree, share_encoder_decoder_embeddings=True, decoder_vocab_size=vocab, tie_word_embeddings=True)
    model = named(
        tree, "seq2seq", norm="pre" if kind in ("pegasus", "mbart") else "post", positions="learned",
        embedding_scale=bool(tree.get("scale_embedding", False)), embedding_norm=kind in ("bart", "mbart"),
    )  # fmt: skip
    return Reading(model, vocab, number(tree, "max_position_embeddings", 1024))


READERS: dict[str, Callable[[Tree], Reading]] = {
    "bert": read_bert,
    "gpt2": read_gpt2,
    "gpt_neox": read_neox,
    **dict.fromkeys(("llama", "mistral", "qwen2"), read_llama),
    **dict.fromkeys(("marian", "pegasus", "bart", "mbart"), read_seq2seq),
}


def halves(count: int, size: int) -> Tensor:
    """Marian's and Pegasus' positions (count, size): as ours, but all sines come before all cosines."""
    angles = torch.arange(count, dtype=torch.float64)[:, None] * torch.exp(
        torch.arange(0, size, 2, dtype=torch.float64) * (-math.log(10_000) / size)
    )
    return torch.cat([angles.sin(), angles.cos()[:, : size // 2]], dim=1).float()
