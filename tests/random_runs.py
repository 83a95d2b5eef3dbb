"""Runs of random weights: what they say is nonsense, but long and decided."""

from pathlib import Path

import torch
from conftest import tiny

from regard.config.config import Config
from regard.config.toml import changed
from regard.data.vocabulary import BOS, EOS, PAD, UNK, Vocabulary
from regard.tasks.models import build
from regard.training.checkpoint import create, save_weights, weights


def drawn(folder: Path, kind: str, *changes: str) -> Path:
    """A run of random weights: what it says is nonsense, but long and decided."""
    lines = ["abcdefghijklmnopqrstuvwxyz", "the quick brown fox"]
    layers = ("model.layers=2",) if kind == "language" else ("model.encoder_layers=2", "model.decoder_layers=1")
    base = read(kind, "model.size=24", "model.feedforward=28", "model.heads=4", *layers, *changes)
    source = Vocabulary.learn(lines, base.text.source)
    target = Vocabulary.learn(["nopqrstuvwxyzabc"], base.text.target) if base.text.target else None
    model = build(base, source.size, target.size if target else None)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
            elif parameter.dim() > 1:
                parameter *= 1.7
        model.output.bias[[PAD, UNK, BOS]] = -40  # as a trained model's: they never come
        model.output.bias[EOS] = 2
    create(folder, base, source, target, {})
    save_weights(folder / "model.safetensors", weights(model), 0)
    return folder


def read(kind: str, *changes: str) -> Config:
    """Settings of a Transformer over letters."""
    raw = tiny().model_dump(exclude_unset=True)
    raw["model"] = {"kind": kind}
    raw["text"] = {"source": {"kind": "char"}, "max_length": 40}
    return changed(Config.model_validate(raw), changes)
