"""A run as a directory that transformers opens, wherever it has an architecture with the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from regard.attention.positions import sinusoidal
from regard.config.config import (
    BlockConfig,
    ClassifierConfig,
    Config,
    EncoderConfig,
    LanguageConfig,
    Model,
    ReaderConfig,
    RNNConfig,
    TransformerConfig,
)
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL, Vocabulary
from regard.errors import ConfigError
from regard.formats.architectures import ACTIVATIONS, FORMS, SETTINGS, Tree, apart, halves, rows, theirs
from regard.formats.gguf import framing
from regard.formats.huggingface_import import DEAD
from regard.inference.predictor import load
from regard.training.checkpoint import Tensors, flush, folder_made, free, weights

NAMES = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
CLASSES = {
    "bert": "BertModel", "gpt2": "GPT2LMHeadModel", "gpt_neox": "GPTNeoXForCausalLM", "llama": "LlamaForCausalLM",
    "marian": "MarianMTModel", "pegasus": "PegasusForConditionalGeneration", "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
}  # fmt: skip
SEQ2SEQ = {
    ("post", "sinusoidal", False): "marian",
    ("pre", "sinusoidal", False): "pegasus",
    ("post", "learned", True): "bart",
    ("pre", "learned", True): "mbart",
}
"""By norm, positions and embedding_norm."""


def export(run: Path, folder: Path, tell: Callable[[str], None] = lambda line: None) -> str:
    """Write a run as a directory of transformers: settings, weights and tokenizer, ids as they are. The folder appears
    when it is whole. Returns the class that opens it; `tell` hears of what is not equal."""
    folder = free(folder)
    predictor = load(run, device="cpu")
    config, tensors = predictor.config, weights(predictor.model)
    try:
        kind = equal(config.model, sines(tensors))
        if predictor.target is not predictor.source:
            raise ConfigError("two vocabularies")
        given, dead = converted(kind, config, tensors)
    except ConfigError as error:
        raise ConfigError(f"{run} cannot be exported, no architecture of transformers is equal: {error}.") from error
    tree = settings(kind, config, predictor.source.size, "lm_head.weight" in given or "embed_out.weight" in given)
    files = {
        "config.json": shown(tree),
        "generation_config.json": shown(generation(kind, config, dead)),
        "tokenizer.json": shown(tokenizer(predictor.source, config.model)),
        "tokenizer_config.json": shown(tokenizer_settings(config)),
        "model.safetensors": save(given, metadata={"format": "pt"}),
    }
    if kind == "bert":
        del files["generation_config.json"]
    with folder_made(folder) as beside:
        for name, data in files.items():
            flush(beside / name, data)
    if dead:
        tell(
            f"{len(dead)} entries that this run never writes take part in the softmax there (Llama's output has no "
            "bias): probabilities of the others are smaller. generate() leaves them out (suppress_tokens)."
        )
    return CLASSES[kind]


def shown(tree: Tree) -> bytes:
    """A tree as a JSON file."""
    return (json.dumps(tree, ensure_ascii=False, indent=2) + "\n").encode()


# --- which architecture ----------------------------------------------------------------------------------------------


def sines(tensors: Tensors) -> bool:
    """Whether tables of positions are those of Marian, as when it was imported."""
    tables = [tensor for name, tensor in tensors.items() if name.endswith("positions.table")]
    return all(torch.equal(table, halves(*table.shape)) for table in tables)


def equal(model: Model, sines: bool = False) -> str:
    """The architecture with the same numbers; if there is none, an error that says why. `sines` says that learned
    positions are Marian's."""
    match model:
        case RNNConfig():
            raise ConfigError("it is recurrent")
        case ClassifierConfig() | ReaderConfig():
            raise ConfigError(f"it is a {model.kind}, with an attention behind its encoder")
        case TransformerConfig(copy_source=True):
            raise ConfigError("its output copies (model.copy_source)")
        case TransformerConfig():
            return equal_seq2seq(model, sines)
        case LanguageConfig():
            return equal_language(model)
    plain(model, "post")
    if not model.embedding_norm or model.positions in ("rotary", "linear"):
        raise ConfigError(f"an encoder with {model.positions} positions, embedding_norm {model.embedding_norm}")
    return "bert"


def plain(model: BlockConfig, norm: str) -> None:
    """Most architectures have one norm and none of the newer options."""
    if model.norm != norm:
        raise ConfigError(f"{model.norm}-norm in a model of kind {getattr(model, 'kind', '')}")
    if model.norm_kind != "layer" or model.gated:
        raise ConfigError(f"norm_kind {model.norm_kind}, gated {model.gated}, with {model.positions} positions")
    if model.key_heads not in (None, model.heads):
        raise ConfigError(f"fewer heads of keys (model.key_heads) with {model.norm_kind} norm")


def equal_seq2seq(model: TransformerConfig, sines: bool) -> str:
    """Of an encoder-decoder."""
    plain(model, model.norm)
    if not model.bias or not model.tied or model.epsilon != 1e-5:
        raise ConfigError(f"model.bias {model.bias}, model.tied {model.tied}, model.epsilon {model.epsilon}")
    learned = model.positions == "learned" and sines and not model.embedding_norm
    form = (model.norm, "sinusoidal" if learned else model.positions, model.embedding_norm)
    if form not in SEQ2SEQ:
        raise ConfigError(f"{model.norm}-norm, {model.positions} positions, embedding_norm {model.embedding_norm}")
    return SEQ2SEQ[form]


def equal_language(model: LanguageConfig) -> str:
    """Of a decoder."""
    if model.positions == "linear" or model.embedding_norm:
        raise ConfigError(f"a decoder with {model.positions} positions, embedding_norm {model.embedding_norm}")
    if (model.norm, model.norm_kind, model.gated, model.positions) == ("pre", "rms", True, "rotary"):
        return "llama"
    plain(model, "pre")
    return "gpt_neox" if model.positions == "rotary" else "gpt2"


# --- weights ---------------------------------------------------------------------------------------------------------


def converted(kind: str, config: Config, tensors: Tensors) -> tuple[Tensors, list[int]]:
    """Our tensors as theirs; and which entries are never written, where the model itself cannot say it."""
    form, model = FORMS[kind], config.model
    assert isinstance(model, BlockConfig)
    if kind in ("marian", "pegasus") and model.positions == "sinusoidal":
        order = torch.cat([torch.arange(0, model.size, 2), torch.arange(1, model.size, 2)])
        tensors = {name: reordered(name, tensor, order) for name, tensor in tensors.items()}
    outside, dead = ends(kind, config, tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        names = theirs(form, name)
        if names is not None:
            counts = rows(name, names, len(tensor), model.heads, model.key_heads)
            parts = apart(form, tensor, counts, model.heads if ".maps." in name else 1)
            found |= dict(zip(names, parts, strict=True))
            if not model.bias and kind != "llama" and name.endswith("weight") and ".norm." not in name:
                zeros = [torch.zeros(part.shape[form.turned]) for part in parts]
                found |= {other.replace(".weight", ".bias"): zero for other, zero in zip(names, zeros, strict=True)}
    prefix = "" if kind == "bert" else form.prefix
    return {name if name.startswith(HEADS) else prefix + name: one for name, one in (found | outside).items()}, dead


HEADS = ("lm_head", "embed_out", "final_logits_bias")


def reordered(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A tensor whose channels of the residual stream come in another order: theirs has all sines, then all cosines."""
    if name == "output.bias" or name.endswith(("maps.bias", "widen.bias")):
        return tensor
    inside = name.endswith(("embedding.weight", "maps.weight", "widen.weight"))
    return tensor[:, order].contiguous() if inside else tensor[order].contiguous()


def ends(kind: str, config: Config, tensors: Tensors) -> tuple[Tensors, list[int]]:
    """What stands outside of blocks: embeddings, positions, output."""
    model: Any = config.model
    table, size = tensors["source_embedding.weight"], model.size
    scaled = table * size**0.5 if model.embedding_scale else table
    match kind:
        case "bert":
            places = positions(tensors, model, "encoder", config.text.max_length + 2)
            return {
                "embeddings.word_embeddings.weight": scaled,
                "embeddings.position_embeddings.weight": places,
                "embeddings.token_type_embeddings.weight": torch.zeros(2, size),
                "pooler.dense.weight": torch.eye(size),  # theirs has one; it is not used
                "pooler.dense.bias": torch.zeros(size),
            }, []
        case "gpt2" | "gpt_neox" | "llama":
            inputs = {"gpt2": "wte", "gpt_neox": "embed_in", "llama": "embed_tokens"}[kind]
            found = {f"{inputs}.weight": scaled}
            if kind == "gpt2":
                found["wpe.weight"] = positions(tensors, model, "decoder", config.text.max_length)
            head, dead = headed(tensors, kind)
            if head is not table or model.embedding_scale:
                found["embed_out.weight" if kind == "gpt_neox" else "lm_head.weight"] = head.clone()
            return found, dead
    found = {"shared.weight": table, "final_logits_bias": tensors["output.bias"][None]}
    for stack in ("encoder", "decoder"):
        places = halves(longest(config), size)
        if kind in ("bart", "mbart"):
            places = torch.cat([torch.zeros(2, size), tensors[f"{stack}.positions.table"]])
        found[f"{stack}.embed_positions.weight"] = places
    return found, []


def longest(config: Config) -> int:
    """Positions of an encoder-decoder."""
    return 2 * config.text.max_length + 2


def positions(tensors: Tensors, model: BlockConfig, stack: str, count: int) -> Tensor:
    """A table (count, size) of what is added to embeddings."""
    match model.positions:
        case "learned":
            return tensors[f"{stack}.positions.table"]
        case "sinusoidal":
            return sinusoidal(torch.arange(count), model.size)
    return torch.zeros(count, model.size)


def headed(tensors: Tensors, kind: str) -> tuple[Tensor, list[int]]:
    """The output matrix of a decoder whose output has no bias. Behind a layer norm the bias has a place nevertheless:
    what is normed sums to zero, so if the norm adds 1 everywhere, a row's sum becomes its bias. Behind an RMS norm
    there is none: entries that are never written are told, another bias is an error."""
    table = tensors.get("output.weight", tensors["source_embedding.weight"])
    bias = tensors["output.bias"]
    if not bias.any():
        return table, []
    if kind == "llama":
        dead = (bias <= DEAD / 2).nonzero().flatten().tolist()
        if bias.count_nonzero() > len(dead):
            raise ConfigError("its output has a bias, and Llama's has none (model.bias = false trains without)")
        return table, dead
    scale, shift = tensors["decoder.norm.weight"].double(), tensors["decoder.norm.bias"].double()
    wide = table.double()
    rest = (wide @ (shift - scale) + bias) / len(scale)
    tensors["decoder.norm.weight"], tensors["decoder.norm.bias"] = torch.ones(len(scale)), torch.ones(len(scale))
    return (wide * scale + rest[:, None]).to(table.dtype), []


# --- settings --------------------------------------------------------------------------------------------------------


def settings(kind: str, config: Config, vocab: int, apart: bool) -> Tree:
    """config.json; `apart` says that the output is not the embedding."""
    model: Any = config.model
    base = {
        "architectures": [CLASSES[kind]], "model_type": kind, "dtype": "float32", "vocab_size": vocab,
        "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": not apart,
    }  # fmt: skip
    named = SETTINGS.get(kind, SETTINGS["seq2seq"])
    own = {theirs: getattr(model, ours) for ours, (theirs, *_) in named.items()}
    own[named["activation"][0]] = NAMES[model.activation]
    own["max_position_embeddings"] = config.text.max_length
    rope = {"rope_theta": model.rotary_base, "rope_type": "default"}
    match kind:
        case "bert":
            own |= {"type_vocab_size": 2, "max_position_embeddings": config.text.max_length + 2}
        case "gpt2":
            own |= {"n_positions": config.text.max_length, "embd_pdrop": model.dropout, "attn_pdrop": model.dropout}
        case "gpt_neox":
            own |= {
                "use_parallel_residual": False, "rotary_pct": 1.0, "rotary_emb_base": model.rotary_base,
                "rope_parameters": rope | {"partial_rotary_factor": 1.0},
            }  # fmt: skip
        case "llama":
            own |= {
                "num_key_value_heads": model.key_heads or model.heads, "attention_bias": model.bias,
                "mlp_bias": model.bias, "rope_theta": model.rotary_base, "rope_parameters": rope,
            }  # fmt: skip
        case _:
            own |= {
                "decoder_ffn_dim": model.feedforward, "decoder_attention_heads": model.heads,
                "scale_embedding": model.embedding_scale, "max_position_embeddings": longest(config),
                "is_encoder_decoder": True, "decoder_start_token_id": BOS, "forced_eos_token_id": EOS,
            }  # fmt: skip
    return base | own


def generation(kind: str, config: Config, dead: list[int]) -> Tree:
    """generation_config.json: as `regard predict`, it never writes <pad> or <bos>."""
    tree: Tree = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "bad_words_ids": [[PAD], [BOS]]}
    if dead:
        tree["suppress_tokens"] = dead
    if isinstance(config.model, TransformerConfig):
        tree |= {"decoder_start_token_id": BOS, "forced_eos_token_id": EOS, "max_length": longest(config) - 1}
    return tree


def tokenizer(vocabulary: Vocabulary, model: Model) -> Tree:
    """tokenizer.json, with our frame around every text."""
    tree: Tree = json.loads(vocabulary.dump())
    encoder, language = isinstance(model, EncoderConfig), isinstance(model, LanguageConfig)
    lead = [SPECIAL[BOS]] if encoder or (isinstance(model, LanguageConfig) and model.begin) else []
    tail = [] if language else [SPECIAL[EOS]]
    if lead or tail:
        tree["post_processor"] = framing(lead, tail, {SPECIAL[BOS]: BOS, SPECIAL[EOS]: EOS})
    return tree


def tokenizer_settings(config: Config) -> Tree:
    """tokenizer_config.json."""
    language, encoder = isinstance(config.model, LanguageConfig), isinstance(config.model, EncoderConfig)
    tree = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
        "model_max_length": config.text.max_length + (2 if encoder else not language),
        "padding_side": "left" if language else "right",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text never turns into a special entry
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return tree | ({"cls_token": SPECIAL[BOS], "sep_token": SPECIAL[EOS]} if encoder else {})
