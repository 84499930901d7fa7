"""The one place where the kernel or its twin is chosen."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megakernel
from megakernel import Decoder, choose_engine, make_decoder
from megakernel import engine as module
from tests.megakernel.random_decoder import KERNEL_SPECS, SPECS, Script, random_tensors

ROOT = Path(megakernel.__file__).parents[1]
SPEC = KERNEL_SPECS["projected"]


@pytest.fixture
def interpreter() -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    if torch.cuda.is_available():
        pytest.skip("with a GPU Triton compiles")


@pytest.fixture
def no_triton(monkeypatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)


def test_the_twin_is_always_there(no_triton) -> None:
    assert choose_engine("twin", "cpu") == choose_engine("twin", torch.device("cuda")) == "twin"
    assert choose_engine("auto", "cpu") == choose_engine("auto", "cuda") == "twin"


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="'fast' is not one of auto, kernel, twin"):
        choose_engine("fast", "cpu")


def test_auto_is_the_twin_on_a_cpu(no_interpreter) -> None:
    assert choose_engine("auto", "cpu") == "twin"


def test_auto_is_the_twin_in_the_interpreter_where_the_kernel_is_for_tests(interpreter) -> None:
    assert choose_engine("auto", "cpu") == "twin"
    assert choose_engine("kernel", "cpu") == "kernel"


def test_the_kernel_on_a_cpu_is_refused(no_interpreter) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    with pytest.raises(ValueError, match=r"cannot run here: the device is cpu, .* a CUDA GPU; use engine='twin'"):
        choose_engine("kernel", "cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_kernel_without_triton_is_refused(no_triton, device) -> None:
    with pytest.raises(ValueError, match="cannot run here: Triton is not installed"):
        choose_engine("kernel", device)


@pytest.mark.parametrize(
    ("capability", "hip", "words"), [((7, 5), None, "8.0"), ((9, 4), "6.4", "NVIDIA"), ((8, 0), None, None)]
)
def test_which_gpus_run_the_kernel(monkeypatch, capability, hip, words) -> None:
    pytest.importorskip("triton", reason="the kernel is written in Triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert choose_engine("auto", "cuda") == ("twin" if words else "kernel")
    if words:
        with pytest.raises(ValueError, match=words):
            choose_engine("kernel", "cuda")
    else:
        assert choose_engine("kernel", "cuda") == "kernel"


def make(engine: str, spec=SPEC, **options) -> Decoder:
    return make_decoder(random_tensors(spec).__getitem__, spec, engine=engine, positions=8, **options)


def test_the_decoder_says_which_engine_it_is(interpreter) -> None:
    assert make("auto", lanes=3).name == "twin"
    kernel = make("kernel", lanes=3)
    assert kernel.name == "kernel"
    assert kernel.state.lanes == 4, "the kernel has a power of two of lanes"
    assert make("twin").weights.packed is None


@pytest.mark.parametrize(("weight_format", "name"), [("bfloat16", "kernel"), ("q8_0", "kernel"), ("float32", "twin")])
def test_auto_leaves_float32_to_the_twin(interpreter, monkeypatch, weight_format, name) -> None:
    monkeypatch.setattr("megakernel.engine.choose_engine", lambda engine, device: "kernel")  # as on a GPU
    assert make("auto", weight_format=weight_format).name == name
    assert make("kernel", weight_format=weight_format).name == "kernel"


def test_auto_leaves_odd_widths_to_the_twin(interpreter, monkeypatch) -> None:
    monkeypatch.setattr("megakernel.engine.choose_engine", lambda engine, device: "kernel")
    odd = replace(SPEC, talker=replace(SPEC.talker, ffn=SPEC.talker.ffn + 8))
    assert make("auto", odd, weight_format="bfloat16").name == "twin"


@pytest.mark.parametrize("weight_format", ["float32", "bfloat16", "q8_0"])
def test_the_kernel_is_made_in_every_format(interpreter, weight_format) -> None:
    kernel = make("kernel", weight_format=weight_format)
    script = Script(SPEC.talker.hidden, 1, 2, 1)
    kernel.begin(0, 3)
    kernel.prefill(0, script.prompt)
    codes = kernel.step([0], script.text)
    assert codes.shape == (1, SPEC.groups) and kernel.state.logits.isfinite().all()


def test_what_the_kernel_cannot_take_is_refused(interpreter) -> None:
    with pytest.raises(ValueError, match="at most 16 lanes, not 17"):
        make("kernel", lanes=17)
    with pytest.raises(ValueError, match="power of two as head_dim, got 6"):
        make("kernel", SPECS["one width"])
    with pytest.raises(ValueError, match="at most 4096 cache positions, not 5000"):
        make_decoder(random_tensors(SPEC).__getitem__, SPEC, engine="kernel", positions=5000)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # importing it fails, and it cannot be found
import torch
import megakernel
from tests.megakernel.random_decoder import SPECS, random_tensors
spec = SPECS["one width"]
decoder = megakernel.make_decoder(random_tensors(spec).__getitem__, spec, lanes=2, positions=4)
assert decoder.name == "twin", decoder.name
try:
    megakernel.choose_engine("kernel", "cpu")
except ValueError as error:
    print(error)
"""


def test_without_triton_there_is_the_twin() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import megakernel, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=100).returncode == 0
