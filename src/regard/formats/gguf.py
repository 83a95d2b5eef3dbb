"""GGUF files, as llama.cpp reads them, in the words of transformers: settings, tensors and a tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import DataError

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": False}
SPLITS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTES],
    "smollm": [DIGITS, BYTES],
    "llama-bpe": [SPLIT, BYTES | {"use_regex": False}],
}
"""How a text is cut into words, by the name that llama.cpp gives it."""
CONTROL, USER = 3, 4
DAMAGE = (ValueError, TypeError, LookupError, AttributeError, OSError, RuntimeError, ArithmeticError, MemoryError)
"""What reading a damaged file raises."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Any]]:
    """The settings as in config.json, the tensors in float32, and the tokenizer's JSON."""
    try:
        import gguf
    except ImportError as error:
        raise DataError(f"{path} needs a package that is not installed: pip install gguf") from error
    try:
        reader = gguf.GGUFReader(path)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        dense: dict[str, Callable[[], Any]] = {
            one.name: lambda one=one: gguf.quants.dequantize(one.data, one.tensor_type)  # type: ignore[misc]
            for one in reader.tensors
        }
        tree = settings(path, facts)
        tree["tie_word_embeddings"] = "output.weight" not in dense
        tensors = {renamed(path, name): torch.tensor(make()).float() for name, make in dense.items()}
        for name, tensor in tensors.items():
            if ".q_proj." in name or ".k_proj." in name:
                heads = tree["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
                tensors[name] = untwisted(tensor, heads)
        return tree, tensors, tokenizer(path, facts)
    except DAMAGE as error:
        raise DataError(f"{path} is damaged, cut short, or no GGUF file: {error!r}.") from error


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
    heads = fact("attention.head_count")
    return {
        "model_type": "llama",
        "hidden_size": fact("embedding_length"),
        "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fact("attention.head_count_kv", heads),
        "head_dim": fact("rope.dimension_count", None),
        "max_position_embeddings": fact("context_length"),
        "rms_norm_eps": fact("attention.layer_norm_rms_epsilon"),
        "rope_theta": fact("rope.freq_base", 10_000.0),
        "vocab_size": len(facts.get("tokenizer.ggml.tokens", ())),
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": facts.get("tokenizer.ggml.padding_token_id"),
    }


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
    if kind != "gpt2" or cut not in SPLITS:
        known = ", ".join(SPLITS)
        raise DataError(f"{path}: the tokenizer is {kind!r}, {cut!r}; known is 'gpt2' with one of: {known}.")
    tokens = facts["tokenizer.ggml.tokens"]
    types = facts.get("tokenizer.ggml.token_type", [1] * len(tokens))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, "special": type_ == CONTROL, **flags}
        for i, (token, type_) in enumerate(zip(tokens, types, strict=True))
        if type_ in (CONTROL, USER)
    ]
    tree: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[cut]},
        "post_processor": None,
        "decoder": BYTES,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": cut == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in facts["tokenizer.ggml.merges"]],
        },
    }
    if facts.get("tokenizer.ggml.add_bos_token", cut == "llama-bpe"):  # as llama.cpp has it where a file is silent
        begin = facts.get("tokenizer.ggml.bos_token_id")
        if not isinstance(begin, int) or not 0 <= begin < len(tokens):
            raise DataError(f"{path}: add_bos_token is set, but bos_token_id is {begin}, expected an entry.")
        tree["post_processor"] = framing([tokens[begin]], [], {tokens[begin]: begin})
    return tree


def framing(lead: list[str], tail: list[str], ids: dict[str, int]) -> dict[str, Any]:
    """A tokenizer's post-processor that puts entries before and after every text."""

    def shown(kind: int) -> list[Any]:
        inside = {"Sequence": {"id": "AB"[kind], "type_id": 0}}
        return [
            *({"SpecialToken": {"id": token, "type_id": 0}} for token in (lead if kind == 0 else [])),
            inside,
            *({"SpecialToken": {"id": token, "type_id": 0}} for token in tail),
        ]

    known = {token: {"id": token, "ids": [i], "tokens": [token]} for token, i in ids.items()}
    return {"type": "TemplateProcessing", "single": shown(0), "pair": [*shown(0), *shown(1)], "special_tokens": known}
