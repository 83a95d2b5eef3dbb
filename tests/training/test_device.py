"""Devices and precision are chosen in one place, and a processor that lies kills only the probe."""

import subprocess
import sys

import pytest
import torch

from regard.errors import ConfigError
from regard.training import device


def test_a_wish_is_granted():
    assert device.precision(torch.device("cpu"), "bfloat16") == torch.bfloat16
    assert device.precision(torch.device("cpu"), "float32") == torch.float32
    assert device.choose("cpu") == torch.device("cpu")


def test_a_device_that_holds_no_numbers_is_refused():
    with pytest.raises(ConfigError, match=r"the device 'meta' cannot be used: .* Choose auto, cpu, cuda or mps"):
        device.choose("meta")


def test_without_announced_bfloat16_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(device, "announces_bfloat16", lambda: False)
    monkeypatch.setattr(subprocess, "run", None)
    assert device.precision(torch.device("cpu")) == torch.float32


def test_a_probe_that_dies_means_float32(monkeypatch):
    monkeypatch.setattr(device, "announces_bfloat16", lambda: True)
    monkeypatch.setattr(device, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert device.precision(torch.device("cpu")) == torch.float32


def test_the_probe_decides(monkeypatch):
    monkeypatch.setattr(device, "announces_bfloat16", lambda: True)
    for ratio, kind in ((0.9, torch.float32), (2.0, torch.bfloat16)):
        monkeypatch.setattr(device, "PROBE", f"print({ratio})")
        assert device.precision(torch.device("cpu")) == kind


def test_the_probe_does_not_run_what_lies_in_the_current_folder(monkeypatch, tmp_path):
    """As a file that happens to be called torch.py."""
    (tmp_path / "lying_here.py").write_text("print(2.0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "announces_bfloat16", lambda: True)
    monkeypatch.setattr(device, "PROBE", "import lying_here")
    assert device.precision(torch.device("cpu")) == torch.float32


def test_memory_can_be_kept_anywhere():
    code = "from regard.training.device import keep_memory; import torch; keep_memory(); torch.ones(2**20).sum()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
