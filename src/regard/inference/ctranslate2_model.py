"""Our weights in CTranslate2's form (fast.py decodes with them)."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.positions import Learned, sinusoidal
from regard.config.config import BlockConfig
from regard.data.vocabulary import BOS, EOS, SPECIAL, UNK, Vocabulary
from regard.errors import ConfigError
from regard.inference.predictor import Predictor, load
from regard.nn.attention import Attention
from regard.nn.transformer import Block, FeedForward, Stack
from regard.tasks.models import Copying, Language, Transformer
from regard.training.checkpoint import folder_made, free

QUANTIZATIONS = (
    "float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"
)  # fmt: skip
"""How weights may be stored; none is float32."""
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu tanh": "GELUTanh", "silu": "SWISH"}


def library() -> Any:
    """The library, if it is installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise ConfigError("this engine needs ctranslate2: pip install 'regard[exchange]'.") from error
    return ctranslate2


# --- our weights in its form -----------------------------------------------------------------------------------------


def export(run: Path, folder: Path, quantization: str = "float32") -> None:
    """Write a run as a CTranslate2 model: its files beside our settings and vocabulary, so that the folder is all that
    `--engine ctranslate2` needs. The folder appears when it is whole."""
    library()
    quantization = "float32" if quantization == "none" else quantization
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is {quantization!r}, expected none, {', '.join(QUANTIZATIONS)}.")
    write(load(run, device="cpu"), run, free(folder), quantization)


def write(predictor: Predictor, run: Path, folder: Path, quantization: str) -> None:
    """Write a model beside its folder, then rename it into place."""
    spec = described(predictor)
    spec.validate()
    spec.optimize(quantization=quantization)
    with folder_made(folder) as beside:
        spec.save(str(beside))
        for name in ("config.toml", "tokenizer.json", "tokenizer.target.json"):
            if (run / name).exists():
                shutil.copyfile(run / name, beside / name)


def described(predictor: Predictor) -> Any:
    """A model as CTranslate2's specification, filled; what it cannot express is an error that says why."""
    from ctranslate2 import specs

    model, config = predictor.model, predictor.config.model
    refuse(model, config)
    assert isinstance(config, BlockConfig)
    longest = 2 * predictor.config.text.max_length + 2
    if isinstance(model, Language):
        decoder = specs.TransformerDecoderSpec(
            *sizes(model.decoder, config), **options(config, decoder=True, alone=True)
        )
        fill_stack(decoder, model.decoder, config, longest)
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(names(predictor.source))
    else:
        assert isinstance(model, Transformer)
        encoder = specs.TransformerEncoderSpec(*sizes(model.encoder, config), **options(config))
        decoder = specs.TransformerDecoderSpec(*sizes(model.decoder, config), **options(config, decoder=True))
        fill_stack(encoder, model.encoder, config, longest)
        fill_stack(decoder, model.decoder, config, longest)
        encoder.embeddings[0].weight = plain(model.source_embedding.weight)
        spec = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(names(predictor.source))
        spec.register_target_vocabulary(names(predictor.target))
        spec.config.decoder_start_token = SPECIAL[BOS]
    table = model.source_embedding if isinstance(model, Language) else model.target_embedding
    decoder.embeddings.weight = plain(table.weight)
    fill_linear(decoder.projection, model.output)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIAL[UNK], SPECIAL[BOS], SPECIAL[EOS]
    spec.config.layer_norm_epsilon = config.epsilon
    return spec


def refuse(model: nn.Module, config: Any) -> None:
    """Say why a model cannot be expressed, if it cannot."""
    why = None
    if isinstance(model, Copying):
        why = "it copies from the source (model.copy_source), and no layer there does"
    elif not isinstance(model, Transformer | Language):
        why = f"it is of kind {config.kind}, and only encoder-decoder and decoder-only Transformers are written there"
    elif config.positions == "linear" and not isinstance(model, Language):
        why = "its positions are linear, which encoders there do not have"
    elif config.positions == "linear" and config.heads & (config.heads - 1):
        why = f"it has linear positions and {config.heads} heads: slopes there are ours for powers of two only"
    if why is not None:
        raise ConfigError(f"this model cannot run on CTranslate2: {why}.")


def sizes(stack: Stack, config: BlockConfig) -> tuple[int, int]:
    """Layers and heads."""
    return len(stack.blocks), config.heads


def options(config: BlockConfig, *, decoder: bool = False, alone: bool = False) -> dict[str, Any]:
    """The form of a stack in CTranslate2's words."""
    from ctranslate2.specs import common_spec

    found: dict[str, Any] = {
        "pre_norm": config.norm == "pre",
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation]),
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": config.gated,
        "rms_norm": config.norm_kind == "rms",
        "num_heads_kv": config.key_heads if config.key_heads != config.heads else None,
    }
    if config.positions == "rotary":
        found |= {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": config.rotary_base}
    if decoder:
        found |= {"with_encoder_attention": not alone, "alibi": config.positions == "linear"}
    return found


def plain(weight: Tensor) -> Any:
    """A weight as numbers in rows."""
    return weight.detach().float().contiguous().numpy()


def fill_linear(spec: Any, layer: Any, rows: slice = slice(None)) -> None:
    """A linear map, or some of its rows."""
    spec.weight = plain(layer.weight[rows])
    if layer.bias is not None:
        spec.bias = plain(layer.bias[rows])


def fill_norm(spec: Any, norm: Any) -> None:
    """A norm of either kind."""
    spec.gamma = plain(norm.weight)
    if hasattr(spec, "beta"):
        spec.beta = plain(norm.bias)


def fill_stack(spec: Any, stack: Stack, config: BlockConfig, longest: int) -> None:
    """Everything of an encoder or a decoder but its embedding and output."""
    spec.scale_embeddings = config.embedding_scale
    if config.positions in ("sinusoidal", "learned", "none"):
        table = stack.positions.table if isinstance(stack.positions, Learned) else torch.zeros(longest, config.size)
        if config.positions == "sinusoidal":
            table = sinusoidal(torch.arange(longest), config.size)
        spec.position_encodings.encodings = plain(table)
    if stack.embedding_norm is not None:
        fill_norm(spec.layernorm_embedding, stack.embedding_norm)
    if config.norm == "pre":
        fill_norm(spec.layer_norm, stack.norm)
    for part, block in zip(spec.layer, stack.blocks, strict=True):
        assert isinstance(block, Block)
        fill_block(part, block)


def fill_block(spec: Any, block: Block) -> None:
    """One layer: its norms are parts of what they stand before or behind."""
    first, *middle, last = (residual.norm for residual in block.residuals)
    attention: Attention = block.self_attention
    fill_linear(spec.self_attention.linear[0], attention.maps)
    fill_linear(spec.self_attention.linear[1], attention.output)
    fill_norm(spec.self_attention.layer_norm, first)
    if block.cross_attention is not None:
        cross, size = block.cross_attention, spec.self_attention.linear[1].weight.shape[0]
        fill_linear(spec.attention.linear[0], cross.maps, slice(0, size))
        fill_linear(spec.attention.linear[1], cross.maps, slice(size, None))
        fill_linear(spec.attention.linear[2], cross.output)
        fill_norm(spec.attention.layer_norm, middle[0])
    feedforward: FeedForward = block.feedforward
    fill_linear(spec.ffn.linear_1, feedforward.narrow)
    fill_norm(spec.ffn.layer_norm, last)
    if feedforward.gate is None:
        fill_linear(spec.ffn.linear_0, feedforward.widen)
    else:
        fill_linear(spec.ffn.linear_0, feedforward.gate)
        fill_linear(spec.ffn.linear_0_noact, feedforward.widen)


def names(vocabulary: Vocabulary) -> list[str]:
    """Every entry by id, each a name of its own."""
    found: list[str] = []
    known: set[str] = set()
    for index in range(vocabulary.size):
        name = vocabulary.token(index)
        name = f"<{index}>" if name in known else name
        known.add(name)
        found.append(name)
    return found
