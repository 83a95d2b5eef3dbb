"""Where and how numbers are multiplied: decided here and nowhere else."""

import ctypes
import platform
import subprocess
import sys
from pathlib import Path

import torch

from regard.errors import ConfigError


def choose(name: str = "auto") -> torch.device:
    """The device of a name; auto: CUDA, then MPS, then the CPU."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        torch.empty(1, device=name).item()
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = name.partition(":")[0] in ("cpu", "cuda", "mps")
        reason = str(error).splitlines()[0][:100] if known else "it is none of these"
        raise ConfigError(f"the device {name!r} cannot be used: {reason}. Choose auto, cpu, cuda or mps.") from error


def keep_memory() -> None:
    """Let glibc keep freed memory instead of giving it back: otherwise a training step spends a quarter of its time in
    page faults for tensors it has just freed (docs/log.md). Other C libraries are left alone."""
    if platform.system() == "Linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        mmap_max, trim_threshold, top_pad = -4, -1, -2
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**26)


PROBE = """
import timeit, torch
def seconds(kind):
    a, b = torch.randn(1024, 512, dtype=kind), torch.randn(512, 512, dtype=kind)
    return min(timeit.repeat(lambda: a @ b, number=4, repeat=6))
print(seconds(torch.float32) / seconds(torch.bfloat16))
"""


def precision(device: torch.device, wanted: str = "auto") -> torch.dtype:
    """float32 or bfloat16: what was wanted, or what this machine multiplies faster. A processor may announce bfloat16
    instructions that its host does not let it run, which kills the process; so another process measures, without
    the current folder among its modules (-P)."""
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    if device.type != "cpu" or not announces_bfloat16():
        return torch.float32
    try:
        command = [sys.executable, "-P", "-c", PROBE]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return torch.bfloat16 if float(run.stdout) > 1.2 else torch.float32
    except (subprocess.SubprocessError, OSError, ValueError):
        return torch.float32


def announces_bfloat16() -> bool:
    """Whether a Linux processor lists bfloat16 products among its features."""
    information = Path("/proc/cpuinfo")
    return information.exists() and "bf16" in information.read_text(encoding="utf-8", errors="replace")
