"""Our weights in CTranslate2's form: written once, and kept beside the run by the hash of what it was made of."""

import atexit
import contextlib
import hashlib
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.attention.positions import sinusoidal
from regard.config.model import BlockConfig
from regard.data.vocabulary import BOS, EOS, SPECIAL, UNK, Vocabulary
from regard.errors import ConfigError, RunError
from regard.nn.layers import LearnedPositions
from regard.nn.transformer import Block, Stack
from regard.tasks.task import Architecture, Task
from regard.training.checkpoint import make_folder

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu tanh": "GELUTanh", "silu": "SWISH"}
DAY = 24 * 3600.0
if platform.machine().lower() in ("x86_64", "amd64"):
    # CTranslate2 reads this when it is imported. It would take oneDNN on processors that are not Intel's, whose int8
    # products are wrong where there is AVX2 but no VNNI.
    os.environ.setdefault("CT2_USE_MKL", "1")


def get_library() -> Any:
    """The library, if it is installed."""
    try:
        import ctranslate2
    except ImportError as error:
        raise ConfigError("this engine needs ctranslate2: pip install 'regard[exchange]'.") from error
    return ctranslate2


def write_model(task: Task, model: Any, run: Path, folder: Path, quantization: str) -> None:
    """Write a model beside its folder, then rename it into place; with our settings and vocabularies, so that the
    folder is all that decoding needs."""
    spec = describe_model(task, model)
    spec.validate()
    spec.optimize(quantization=quantization)
    with make_folder(folder) as beside:
        spec.save(str(beside))
        for name in ("config.toml", "tokenizer.json", "tokenizer.target.json"):
            if (run / name).exists():
                shutil.copyfile(run / name, beside / name)


def convert_run(task: Task, model: Any, run: Path, quantization: str) -> Path:
    """The folder of a run in CTranslate2's form: as it was written before, if weights, settings and vocabularies are
    still those; else written now, and what is older than a day removed. A run that cannot be written to has its model
    in a temporary place."""
    with (run / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    settings = task.config.model_dump_json(include={"model", "text"})
    digest.update("".join([settings, task.source.dump(), task.target.dump()]).encode())
    home = run / "ctranslate2"
    folder = home / f"{digest.hexdigest()}-{quantization}"
    if folder.exists():
        with contextlib.suppress(OSError):
            os.utime(folder)  # it is in use
        return folder
    try:
        write_model(task, model, run, folder, quantization)
    except (OSError, RunError):
        if folder.exists():  # another process was faster
            return folder
        folder = Path(tempfile.mkdtemp(prefix="regard-")) / "model"
        atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)
        write_model(task, model, run, folder, quantization)
        return folder
    for other in home.iterdir():
        with contextlib.suppress(OSError):  # another process may remove it, too
            if time.time() - other.stat().st_mtime > DAY:  # one that is younger may be in use by a server
                shutil.rmtree(other, ignore_errors=True)
    return folder


def check_expressible(task: Task) -> Architecture:
    """The architecture of a model that CTranslate2 can express; what it cannot is an error that says why."""
    try:
        architecture = task.architecture()
        if not architecture.decoder:
            raise ConfigError("it is an encoder alone, which answers nothing")
        config: Any = task.config.model
        if config.positions == "alibi" and architecture.encoder:
            raise ConfigError("its positions are ALiBi, which encoders there do not have")
        if config.attention != "full":
            raise ConfigError(
                f"its tokens do not see all others (model.attention {config.attention}), and all do there"
            )
        if config.normalize != "softmax":
            raise ConfigError(f"its weights are not softmax's (model.normalize {config.normalize}), and all are there")
    except ConfigError as error:
        raise ConfigError(f"this model cannot run on CTranslate2: {error}.") from error
    return architecture


def describe_model(task: Task, model: Any) -> Any:
    """A model as CTranslate2's specification, filled."""
    from ctranslate2 import specs

    config: Any = task.config.model
    longest = 2 * task.config.text.max_length + 2
    alone = not check_expressible(task).encoder
    own = {"with_encoder_attention": not alone, "alibi": config.positions == "alibi", **options(config)}
    decoder = specs.TransformerDecoderSpec(len(model.decoder.blocks), config.heads, **own)
    fill_stack(decoder, model.decoder, config, longest)
    fill_linear(decoder.projection, model.output)
    if alone:
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(name_entries(task.source))
        decoder.embeddings.weight = plain(model.source_embedding.weight)
    else:
        encoder = specs.TransformerEncoderSpec(len(model.encoder.blocks), config.heads, **options(config))
        fill_stack(encoder, model.encoder, config, longest)
        encoder.embeddings[0].weight = plain(model.source_embedding.weight)
        spec = specs.TransformerSpec(encoder, decoder)
        spec.register_source_vocabulary(name_entries(task.source))
        spec.register_target_vocabulary(name_entries(task.target))
        spec.config.decoder_start_token = SPECIAL[BOS]
        decoder.embeddings.weight = plain(model.target_embedding.weight)
    spec.config.unk_token, spec.config.bos_token, spec.config.eos_token = SPECIAL[UNK], SPECIAL[BOS], SPECIAL[EOS]
    spec.config.layer_norm_epsilon = config.norm_epsilon
    return spec


def options(config: BlockConfig) -> dict[str, Any]:
    """The form of a stack in CTranslate2's words."""
    from ctranslate2.specs import common_spec

    found: dict[str, Any] = {
        "pre_norm": config.norm == "pre",
        "activation": getattr(common_spec.Activation, ACTIVATIONS[config.activation]),
        "layernorm_embedding": config.embedding_norm,
        "ffn_glu": config.gated,
        "rms_norm": config.norm_kind == "rms",
        "num_heads_kv": config.kv_heads if config.kv_heads != config.heads else None,
    }
    if config.positions == "rotary":
        found |= {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": config.rotary_base}
    return found


def plain(weight: Tensor) -> Any:
    """A weight as numbers in rows of their own: CTranslate2 quantizes in place."""
    return weight.float().numpy(force=True).copy()


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
    if config.positions not in ("rotary", "alibi"):
        table = torch.zeros(longest, config.size)
        if config.positions == "sinusoidal":
            table = sinusoidal(torch.arange(longest), config.size)
        elif isinstance(stack.positions, LearnedPositions):
            table = stack.positions.table
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
    fill_linear(spec.self_attention.linear[0], block.self_attention.projection)
    fill_linear(spec.self_attention.linear[1], block.self_attention.output)
    fill_norm(spec.self_attention.layer_norm, first)
    if block.cross_attention is not None:
        cross, size = block.cross_attention, spec.self_attention.linear[1].weight.shape[0]
        fill_linear(spec.attention.linear[0], cross.projection, slice(0, size))
        fill_linear(spec.attention.linear[1], cross.projection, slice(size, None))
        fill_linear(spec.attention.linear[2], cross.output)
        fill_norm(spec.attention.layer_norm, middle[0])
    up, gate = block.feedforward.up, block.feedforward.gate
    fill_linear(spec.ffn.linear_0, up if gate is None else gate)
    if gate is not None:
        fill_linear(spec.ffn.linear_0_noact, up)
    fill_linear(spec.ffn.linear_1, block.feedforward.down)
    fill_norm(spec.ffn.layer_norm, last)


def name_entries(vocabulary: Vocabulary) -> list[str]:
    """Every entry by id, each a name of its own."""
    found: list[str] = []
    known: set[str] = set()
    for index in range(vocabulary.size):
        name = vocabulary.token(index)
        name = f"<{index}>" if name in known else name
        while name in known:
            name = f"<{name}>"
        found.append(name)
        known.add(name)
    return found
