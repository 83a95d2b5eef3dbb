"""Runs of random weights: what they say is nonsense, but long and decided."""

from pathlib import Path

import torch
from conftest import tiny
from models import build

from regard.config.run import Config
from regard.config.toml import change
from regard.data.vocabulary import BOS, EOS, PAD, UNK, Vocabularies, Vocabulary
from regard.training.checkpoint import create_run, get_weights, save_weights


def drawn(folder: Path, kind: str, *changes: str) -> Path:
    """A run of random weights: what it says is nonsense, but long and decided. `kind` is model.kind."""
    lines = ["abcdefghijklmnopqrstuvwxyz", "the quick brown fox"]
    layers = ("model.layers=2",) if kind == "language model" else ("model.encoder_layers=2", "model.decoder_layers=1")
    base = read(kind, "model.size=24", "model.feedforward=28", "model.heads=4", *layers, *changes)
    source = Vocabulary.learn(lines, base.text.source)
    target = Vocabulary.learn(["nopqrstuvwxyzabc"], base.text.target) if base.text.target else source
    model = build(base, source, target)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
            elif parameter.dim() > 1:
                parameter *= 1.7
        model.output.bias[[PAD, UNK, BOS]] = -40  # as a trained model's: they never come
        model.output.bias[EOS] = 2
    create_run(folder, base, Vocabularies(source, target), {})
    save_weights(folder / "model.safetensors", get_weights(model), 0)
    return folder


def read(kind: str, *changes: str) -> Config:
    """Settings of a Transformer over letters."""
    raw = tiny().model_dump(exclude_unset=True)
    raw["model"] = {"kind": kind}
    raw["text"] = {"source": {"kind": "char"}, "max_length": 40}
    return change(Config.model_validate(raw), changes)
