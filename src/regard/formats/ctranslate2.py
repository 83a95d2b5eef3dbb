"""A run as a CTranslate2 model."""

from pathlib import Path

from regard.errors import ConfigError
from regard.inference.ctranslate2_model import get_library, write_model
from regard.inference.load import load_model
from regard.tasks import make_task
from regard.training.checkpoint import check_free, load_config, load_vocabularies

QUANTIZATIONS = (
    "float32", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16"
)  # fmt: skip
"""How weights may be stored; none is float32."""


def export_ctranslate2(run: Path, folder: Path, quantization: str = "float32") -> None:
    """Write a run as a CTranslate2 model: its files beside our settings and vocabularies, so that the folder is all
    that `regard predict` needs. The folder appears when it is whole."""
    get_library()
    quantization = "float32" if quantization == "none" else quantization
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"--quantization is {quantization!r}, expected none, {', '.join(QUANTIZATIONS)}.")
    folder, task = check_free(folder), make_task(load_config(run), load_vocabularies(run))
    write_model(task, load_model(task, run), run, folder, quantization)
