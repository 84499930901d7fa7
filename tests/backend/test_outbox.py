"""The outbox: on a CPU what is put in is there; on a GPU, against a stand-in, one wait for all, with an end."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from backend import outbox
from backend.outbox import Outbox, wait_for
from megakernel import KernelFaultError


def test_on_a_cpu_a_tensor_is_where_it_should_go() -> None:
    box, tensor = Outbox(torch.device("cpu")), torch.arange(3)
    assert box.put(tensor) is tensor
    box.wait()


class Event:
    """Happens at the third question after it was recorded, or never."""

    def __init__(self, never: bool = False) -> None:
        self.recorded, self.asked, self.never = 0, 0, never

    def record(self) -> None:
        self.recorded += 1
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return not self.never and self.asked >= 3


def gpu_outbox(monkeypatch: pytest.MonkeyPatch, event: Event, **options) -> Outbox:
    empty = torch.empty

    def pinned(*shape, pin_memory: bool = False, **given):
        assert pin_memory, "a copy into memory that is not pinned waits"
        return empty(*shape, **given)

    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(outbox, "torch", SimpleNamespace(cuda=torch.cuda, empty=pinned))
    return Outbox(torch.device("cuda"), **options)


def test_on_a_gpu_one_event_is_waited_for(monkeypatch) -> None:
    event, tensor = Event(), torch.arange(6).view(2, 3)
    box = gpu_outbox(monkeypatch, event)
    hosts = [box.put(tensor), box.put(tensor[:1] + 1)]
    assert event.recorded == 0
    box.wait()
    assert (event.recorded, event.asked) == (1, 3)
    assert [host.tolist() for host in hosts] == [[[0, 1, 2], [3, 4, 5]], [[1, 2, 3]]]
    assert hosts[0].data_ptr() != tensor.data_ptr()


def test_a_device_that_does_not_answer_is_a_fault(monkeypatch) -> None:
    box, begun = gpu_outbox(monkeypatch, Event(never=True), patience=0.05), time.monotonic()
    with pytest.raises(KernelFaultError, match=r"not answered for 0\.05 seconds") as caught:
        box.wait()
    assert 0.05 <= time.monotonic() - begun < 5
    assert caught.value.stage.startswith("unknown")


def test_a_long_wait_lets_others_run(monkeypatch) -> None:
    naps: list[float] = []
    clock = iter(x / 100 for x in range(100))
    monkeypatch.setattr(outbox, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=naps.append))
    with pytest.raises(KernelFaultError):
        wait_for(Event(never=True), 0.055)  # type: ignore[arg-type]
    assert naps == [0, 0.001, 0.001, 0.001, 0.001]
