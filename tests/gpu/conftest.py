"""Everything in this directory is marked ``gpu``, and skipped where there is no CUDA GPU.

With ``GPU_TESTS_DRY=1`` it runs on the CPU instead: kernels in Triton's interpreter, everything small, and what only a
card can do is skipped. Each test has a time limit of its own, as one that waits for a device can be stopped by nothing
but the end of the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.parity import DEVICE, DRY, KERNELS, Kernel
from tests.gpu.stage_bench import CASES, DRY_CASES, Case

HERE = Path(__file__).parent
LIMIT = 60.0  # seconds
# what needs no kernel of a whole frame comes first, for these are compiled meanwhile
ORDER = ("barrier", "drawing", "graphs", "baseline", "stages", "frames", "lanes", "synthesizer", "precision")
STDERR, NOTES = pytest.StashKey[int](), pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before the markers are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = [index for index, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[index] for index in places), key=lambda item: ORDER.index(item.path.stem[len("test_") :]))
    for index, item in zip(places, mine, strict=True):
        items[index] = item
        item.add_marker(pytest.mark.gpu)
        if not DRY and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA GPU"))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.dup(2)  # the one that pytest does not capture
    config.stash[NOTES] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash[NOTES]:
        terminalreporter.section("seen on the way")
        for line in config.stash[NOTES]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """`note(line)`: something to be told at the end that no test requires."""
    return request.config.stash[NOTES].append


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def card(device) -> torch.device:
    """The device of a test that a CPU cannot stand in for."""
    if DRY:
        pytest.skip("a CPU cannot stand in for the card")
    return device


def arm(config: pytest.Config) -> None:
    faulthandler.dump_traceback_later(LIMIT, exit=True, file=config.stash[STDERR])


@pytest.fixture(autouse=True)
def limit(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process, and says where it was, if a test takes longer."""
    arm(request.config)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if not DRY:
        yield
        return
    from tests.megakernel.interpreted_grid import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture(scope="session")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose kernel is small and soon compiled: one layer a stack, and widths that one chunk holds."""
    from backend import make_checkpoint as module

    talker, predictor = module._talker_widths, module._predictor_config
    with pytest.MonkeyPatch.context() as patch:
        widths = module._widths(1, 64, 128, 4, 2, 16)
        patch.setattr(module, "_talker_widths", lambda preset: talker(preset) | widths)
        narrower = module._widths(1, 32, 64, 4, 2, 16) | {"layer_types": ["full_attention"]}
        patch.setattr(module, "_predictor_config", lambda *args: predictor(*args) | narrower)
        return module.make_checkpoint(tmp_path_factory.mktemp("speaker") / "checkpoint", "tiny")


@pytest.fixture(scope="session")
def spoken(speaker) -> Kernel:
    """The kernel of that checkpoint, for four lanes that speak."""
    from backend.checkpoint import Checkpoint

    return Kernel("speaker", Checkpoint(speaker).config.spec, "float32", 2 if DRY else 4, 128)


@pytest.fixture(scope="session", autouse=True)
def built(request: pytest.FixtureRequest, spoken, note) -> Iterator[Callable[[Kernel | Case], None]]:
    """`built(kernel)` returns when that kernel is in the compiler's cache; its time does not count as the test's."""
    every = [*KERNELS, spoken, *(DRY_CASES if DRY else CASES)]
    if DRY or not torch.cuda.is_available():
        yield lambda kernel: None if kernel in every else pytest.fail(f"{kernel} is not among those that are compiled")
        return
    from tests.gpu.builder import Builder

    with contextlib.closing(Builder(every)) as builder:

        def wait(kernel: Kernel | Case) -> None:
            faulthandler.cancel_dump_traceback_later()
            try:
                seconds = builder.wait(kernel)
            finally:
                arm(request.config)
            if isinstance(kernel, Kernel):
                note(f"{kernel}: compiled in {seconds:.0f} s")

        yield wait
