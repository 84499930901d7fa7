"""The ladder: rungs, padding, blanks; and that what it captures runs on what it is given later."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megakernel.graphs import Ladder, enter_device, to_device
from tests.megakernel.recording import recorded_on_cpu

CPU = torch.device("cpu")


def blank(size: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    rows, width = size
    return torch.full((rows, width), -1.0), torch.full((rows,), 7, dtype=torch.int64)


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y[:, None]


def ladder(function=add, sizes=((2, 2), (2, 4), (4, 2), (4, 4))) -> Ladder:
    return Ladder("{} by {}", function, blank, sizes, CPU)


@pytest.mark.parametrize(
    ("wanted", "fit"), [((1, 1), (2, 2)), ((2, 3), (2, 4)), ((3, 1), (4, 2)), ((4, 4), (4, 4)), ((5, 1), None)]
)
def test_the_first_rung_that_holds_what_is_wanted(wanted, fit) -> None:
    assert ladder(sizes=[(4, 4), (2, 4), (4, 2), (2, 2)]).fit(*wanted) == fit


@pytest.mark.parametrize("recorded", [False, True])
def test_what_is_not_given_is_blank_also_after_something_was_there(recorded) -> None:
    def run() -> None:
        both = ladder()
        full = both((2, 4), torch.full((2, 4), 5.0), torch.tensor([1, 2]))
        assert full.tolist() == [[6.0] * 4, [7.0] * 4]
        part = both((2, 4), torch.full((1, 2), 3.0), torch.tensor([1]))
        assert part.tolist() == [[4.0, 4.0, 0.0, 0.0], [6.0] * 4]
        assert full.tolist() == [[6.0] * 4, [7.0] * 4], "a result is the caller's own"

    if recorded:
        with recorded_on_cpu() as recorder:
            run()
        assert (recorder.recorded, recorder.replayed) == (1, 2)
    else:
        run()


def test_capturing_makes_every_rung_the_largest_first_and_says_so() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def watched(x: Tensor, y: Tensor) -> Tensor:
        seen.append((x.clone(), y.clone()))
        return add(x, y)

    said: list[str] = []
    with recorded_on_cpu() as recorder:
        steps = ladder(watched)
        steps.capture(said.append)
        assert said == ["4 by 4", "4 by 2", "2 by 4", "2 by 2"]
        assert list(dict.fromkeys(x.shape for x, _ in seen)) == [(4, 4), (4, 2), (2, 4), (2, 2)]
        blanks = all((x == -1).all() and (y == 7).all() for x, y in seen)
        assert blanks, "a rung is tried on something else than blanks"
        calls = len(seen)
        steps((4, 4), torch.zeros(3, 3), torch.zeros(3, dtype=torch.int64))
        assert len(seen) == calls and recorder.recorded == 4, "a rung was captured twice, or called"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[: int(y[0])],
        lambda x, y: x if y[0] > 3 else y,
        lambda x, y: x * y.tolist()[0],
        lambda x, y: x[y > 3],
        lambda x, y: x + torch.tensor([1.0]),
    ],
)
def test_a_function_that_asks_for_a_number_is_refused_here_as_on_a_gpu(function) -> None:
    with recorded_on_cpu(), pytest.raises(AssertionError, match="cannot be captured"):
        ladder(function).capture()


def test_numbers_go_to_the_device_as_int64() -> None:
    assert to_device([[1, 2], [3, 4]], CPU).dtype == torch.int64
    assert to_device([], CPU).shape == (0,) and to_device([], CPU).dtype == torch.int64
    enter_device(CPU)


class Log(list):
    """What was asked of the stand-in for ``torch.cuda``, in order."""

    def note(self, *what):
        self.append(what)

    @contextmanager
    def inside(self, *what):
        self.append(("enter", *what))
        yield
        self.append(("leave", *what))


def test_a_capture_warms_up_on_its_own_stream_and_then_only_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that only a GPU can answer, in their order, against a stand-in."""
    log = Log()
    side = SimpleNamespace(wait_stream=lambda other: log.note("side waits for", other))
    main = SimpleNamespace(wait_stream=lambda other: log.note("main waits for", "side" if other is side else other))
    stand_in = {
        "Stream": lambda device: side,
        "graph_pool_handle": lambda: "pool",
        "current_stream": lambda: main,
        "device": lambda device: log.inside("device", device.type),
        "stream": lambda stream: log.inside("side"),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.note("replay")),
        "graph": lambda graph, pool, stream, capture_error_mode: log.inside("graph", pool, capture_error_mode),
    }
    for name, value in stand_in.items():
        monkeypatch.setattr(torch.cuda, name, value)

    def function(x: Tensor, y: Tensor) -> Tensor:
        log.note("function")
        return add(x, y)

    steps = Ladder("{} by {}", function, blank, [(2, 2)], CPU)
    steps.record.__init__(torch.device("cuda"))
    steps((2, 2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    steps((2, 2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64))
    graph = ("graph", "pool", "thread_local")
    assert log == [
        ("enter", "device", "cuda"),
        ("side waits for", main),
        *[("enter", "side"), ("function",), ("function",), ("leave", "side")],
        ("main waits for", "side"),
        *[("enter", *graph), ("function",), ("leave", *graph)],
        ("leave", "device", "cuda"),
        ("replay",),
        ("replay",),
    ]
