"""A run as a directory that transformers opens, wherever it has an architecture with the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from regard.attention.positions import sinusoidal
from regard.config.model import BlockConfig, EncoderConfig, LanguageModelConfig, TransformerConfig
from regard.config.run import Config
from regard.data.vocabulary import BOS, EOS, PAD, SPECIAL
from regard.errors import ConfigError
from regard.formats.architectures import (
    ACTIVATIONS,
    LAYOUTS,
    SETTINGS,
    Tree,
    count_rows,
    marian_positions,
    split_tensor,
    their_names,
)
from regard.formats.gguf import framing
from regard.formats.huggingface_import import DEAD
from regard.inference.load import load_model
from regard.tasks import make_task
from regard.tasks.task import Task
from regard.training.checkpoint import (
    Tensors,
    check_free,
    flush_file,
    get_weights,
    load_config,
    load_vocabularies,
    make_folder,
)

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


def export_huggingface(run: Path, folder: Path, tell: Callable[[str], None] = lambda line: None) -> str:
    """Write a run as a directory of transformers: settings, weights and tokenizer, ids as they are. The folder appears
    when it is whole. Returns the class that opens it; `tell` hears of what is not equal."""
    folder = check_free(folder)
    config = load_config(run)
    task = make_task(config, load_vocabularies(run))
    tensors = get_weights(load_model(task, run))
    try:
        kind = find_architecture(task, tensors)
        given, dead = convert_tensors(kind, config, tensors)
    except ConfigError as error:
        raise ConfigError(f"{run} cannot be exported, no architecture of transformers is equal: {error}.") from error
    apart = f"{LAYOUTS[kind].output}.weight" in given
    trees = {
        "config": make_settings(kind, config, task.source.size, apart),
        "tokenizer": make_tokenizer(task),
        "tokenizer_config": make_tokenizer_settings(task),
    } | ({} if kind == "bert" else {"generation_config": make_generation(task, dead)})
    with make_folder(folder) as beside:
        for name, tree in trees.items():
            flush_file(beside / f"{name}.json", (json.dumps(tree, ensure_ascii=False, indent=2) + "\n").encode())
        flush_file(beside / "model.safetensors", save(given, metadata={"format": "pt"}))
    if dead:
        tell(
            f"{len(dead)} entries that this run never writes take part in the softmax there (Llama's output has no "
            "bias): probabilities of the others are smaller. generate() leaves them out (suppress_tokens)."
        )
    return CLASSES[kind]


def find_architecture(task: Task, tensors: Tensors) -> str:
    """The architecture of transformers with the same numbers; if there is none, an error that says why."""
    architecture, model = task.architecture(), task.config.model  # which recurrent models refuse to say
    if not task.vocabularies.shared:
        raise ConfigError("two vocabularies")
    if isinstance(model, BlockConfig) and model.attention != "full":
        raise ConfigError(f"attention that does not see all tokens as they are (model.attention {model.attention})")
    if isinstance(model, BlockConfig) and model.normalize != "softmax":
        raise ConfigError(f"attention whose weights are not softmax's (model.normalize {model.normalize})")
    match architecture, model:
        case (True, True), TransformerConfig():
            tables = [tensor for name, tensor in tensors.items() if name.endswith("positions.table")]
            return find_seq2seq(model, all(torch.equal(table, marian_positions(*table.shape)) for table in tables))
        case (False, True), LanguageModelConfig():
            return find_decoder(model)
        case (True, False), EncoderConfig():
            check_plain(model, "post")
            if not model.embedding_norm or model.positions in ("rotary", "alibi"):
                raise ConfigError(f"an encoder with {model.positions} positions, embedding_norm {model.embedding_norm}")
            return "bert"
    raise ConfigError(f"a model of kind {model.kind}")


def check_plain(model: BlockConfig, norm: str) -> None:
    """Most architectures have one norm and none of the newer options."""
    if model.norm != norm:
        raise ConfigError(f"{model.norm}-norm in a model of kind {getattr(model, 'kind', '')}")
    if model.norm_kind != "layer" or model.gated:
        raise ConfigError(f"norm_kind {model.norm_kind}, gated {model.gated}, with {model.positions} positions")
    if model.kv_heads not in (None, model.heads):
        raise ConfigError(f"fewer heads of keys (model.kv_heads) with {model.norm_kind} norm")


def find_seq2seq(model: TransformerConfig, marian: bool) -> str:
    """Of an encoder-decoder; `marian` says that its positions are Marian's, as when that was imported."""
    check_plain(model, model.norm)
    if not model.bias or not model.tie_embeddings or model.norm_epsilon != 1e-5:
        named = [f"model.{name} {getattr(model, name)}" for name in ("bias", "tie_embeddings", "norm_epsilon")]
        raise ConfigError(", ".join(named))
    learned = model.positions == "learned" and marian and not model.embedding_norm
    layout = (model.norm, "sinusoidal" if learned else model.positions, model.embedding_norm)
    if layout not in SEQ2SEQ:
        raise ConfigError(f"{model.norm}-norm, {model.positions} positions, embedding_norm {model.embedding_norm}")
    return SEQ2SEQ[layout]


def find_decoder(model: LanguageModelConfig) -> str:
    """Of a decoder."""
    if model.positions == "alibi" or model.embedding_norm:
        raise ConfigError(f"a decoder with {model.positions} positions, embedding_norm {model.embedding_norm}")
    if (model.norm, model.norm_kind, model.gated, model.positions) == ("pre", "rms", True, "rotary"):
        return "llama"
    check_plain(model, "pre")
    return "gpt_neox" if model.positions == "rotary" else "gpt2"


def convert_tensors(kind: str, config: Config, tensors: Tensors) -> tuple[Tensors, list[int]]:
    """Our tensors as theirs; and which entries are never written, where the model itself cannot say it."""
    layout, model = LAYOUTS[kind], config.model
    assert isinstance(model, BlockConfig)
    if kind in ("marian", "pegasus") and model.positions == "sinusoidal":
        order = torch.cat([torch.arange(0, model.size, 2), torch.arange(1, model.size, 2)])
        tensors = {name: reorder_channels(name, tensor, order) for name, tensor in tensors.items()}
    outside, dead = convert_ends(kind, config, tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        names = their_names(layout, name)
        if names is not None:
            counts = count_rows(names, len(tensor), model.heads, model.kv_heads)
            parts = split_tensor(layout, tensor, counts, model.heads if ".projection." in name else 1)
            found |= dict(zip(names, parts, strict=True))
            if not model.bias and kind != "llama" and name.endswith("weight") and ".norm." not in name:
                zeros = [torch.zeros(part.shape[layout.transposed]) for part in parts]
                found |= {other.replace(".weight", ".bias"): zero for other, zero in zip(names, zeros, strict=True)}
    prefix = "" if kind == "bert" else layout.prefix
    heads = (layout.output, "final_logits_bias")
    return {name if name.startswith(heads) else prefix + name: one for name, one in (found | outside).items()}, dead


def reorder_channels(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """A tensor whose channels of the residual stream come in another order: theirs has all sines, then all cosines."""
    if name == "output.bias" or name.endswith(("projection.bias", "up.bias")):
        return tensor
    inside = name.endswith(("embedding.weight", "projection.weight", "up.weight"))
    return tensor[:, order].contiguous() if inside else tensor[order].contiguous()


def convert_ends(kind: str, config: Config, tensors: Tensors) -> tuple[Tensors, list[int]]:
    """What stands outside of blocks: embeddings, positions, output."""
    model: Any = config.model
    layout = LAYOUTS[kind]
    table, size = tensors["source_embedding.weight"], model.size
    scaled = table * size**0.5 if model.embedding_scale else table
    match kind:
        case "bert":
            places = position_table(tensors, model, "encoder", config.text.max_length + 2)
            return {
                "embeddings.word_embeddings.weight": scaled,
                "embeddings.position_embeddings.weight": places,
                "embeddings.token_type_embeddings.weight": torch.zeros(2, size),
                "pooler.dense.weight": torch.eye(size),  # theirs has one; it is not used
                "pooler.dense.bias": torch.zeros(size),
            }, []
        case "gpt2" | "gpt_neox" | "llama":
            found = {f"{layout.embedding}.weight": scaled}
            if kind == "gpt2":
                found["wpe.weight"] = position_table(tensors, model, "decoder", config.text.max_length)
            head, dead = make_head(tensors, kind)
            if head is not table or model.embedding_scale:
                found[f"{layout.output}.weight"] = head.clone()
            return found, dead
    found = {"shared.weight": table, "final_logits_bias": tensors["output.bias"][None]}
    for stack in ("encoder", "decoder"):
        places = marian_positions(count_positions(config), size)
        if kind in ("bart", "mbart"):
            places = torch.cat([torch.zeros(2, size), tensors[f"{stack}.positions.table"]])
        found[f"{stack}.embed_positions.weight"] = places
    return found, []


def count_positions(config: Config) -> int:
    """Positions of an encoder-decoder."""
    return 2 * config.text.max_length + 2


def position_table(tensors: Tensors, model: BlockConfig, stack: str, count: int) -> Tensor:
    """A table (count, size) of what is added to embeddings."""
    match model.positions:
        case "learned":
            return tensors[f"{stack}.positions.table"]
        case "sinusoidal":
            return sinusoidal(torch.arange(count), model.size)
    return torch.zeros(count, model.size)


def make_head(tensors: Tensors, kind: str) -> tuple[Tensor, list[int]]:
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
    tensors |= {f"decoder.norm.{leaf}": torch.ones(len(scale)) for leaf in ("weight", "bias")}
    return (wide * scale + rest[:, None]).to(table.dtype), []


def make_settings(kind: str, config: Config, vocab: int, apart: bool) -> Tree:
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
                "num_key_value_heads": model.kv_heads or model.heads, "attention_bias": model.bias,
                "mlp_bias": model.bias, "rope_theta": model.rotary_base, "rope_parameters": rope,
            }  # fmt: skip
        case _:
            own |= {
                "decoder_ffn_dim": model.feedforward, "decoder_attention_heads": model.heads,
                "scale_embedding": model.embedding_scale, "max_position_embeddings": count_positions(config),
                "is_encoder_decoder": True, "decoder_start_token_id": BOS, "forced_eos_token_id": EOS,
            }  # fmt: skip
    return base | own


def make_generation(task: Task, dead: list[int]) -> Tree:
    """generation_config.json: as `regard predict`, it never writes <pad> or <bos>."""
    tree: Tree = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "bad_words_ids": [[PAD], [BOS]]}
    if dead:
        tree["suppress_tokens"] = dead
    if all(task.architecture()):
        last = count_positions(task.config) - 1
        tree |= {"decoder_start_token_id": BOS, "forced_eos_token_id": EOS, "max_length": last}
    return tree


def make_tokenizer(task: Task) -> Tree:
    """tokenizer.json, with our frame around every text."""
    tree: Tree = json.loads(task.source.dump())
    lead, tail = ([SPECIAL[i] for i in part] for part in task.frame())
    if lead or tail:
        tree["post_processor"] = framing(lead, tail, {SPECIAL[BOS]: BOS, SPECIAL[EOS]: EOS})
    return tree


def make_tokenizer_settings(task: Task) -> Tree:
    """tokenizer_config.json."""
    lead, tail = task.frame()
    encoder, decoder = task.architecture()
    tree = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("pad_token", "unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
        "model_max_length": task.config.text.max_length + (len(lead) + len(tail) if encoder else 0),
        "padding_side": "right" if encoder else "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,  # a text never turns into a special entry
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return tree | ({"cls_token": SPECIAL[BOS], "sep_token": SPECIAL[EOS]} if not decoder else {})
