"""The synthesizer as its callers hold it: streams, company, live text, cancelling, bad requests and faults."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from backend import (
    Chunk,
    EngineError,
    RequestError,
    Sampling,
    SpeechRequest,
    Synthesizer,
    Utterance,
    Voice,
    make_checkpoint,
)
from backend.codec import Codec
from megakernel import CacheFullError, KernelFaultError

TEXT = "It was the best of times, it was the worst of times."
SHORT = Sampling(max_frames=20)


@pytest.fixture(scope="module")
def synthesizer(tiny) -> Iterator[Synthesizer]:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=3) as synthesizer:
        yield synthesizer


@pytest.fixture(scope="module")
def base(tiny) -> Iterator[Synthesizer]:
    with Synthesizer.from_pretrained(tiny("base"), lanes=2) as synthesizer:
        yield synthesizer


def request(text: str | None = TEXT, seed: int = 1, **fields) -> SpeechRequest:
    return SpeechRequest(text, **{"voice": "ryan", "seed": seed, "sampling": SHORT, **fields})


def codes_of(chunks: list[Chunk]) -> np.ndarray:
    return np.concatenate([chunk.codes for chunk in chunks])


def samples_of(chunks: list[Chunk]) -> np.ndarray:
    return np.concatenate([chunk.samples for chunk in chunks])


def settle(synthesizer: Synthesizer) -> None:
    """Wait until no lane is taken: the engine says so itself when it has nothing to do."""
    idle = threading.Event()
    probe = synthesizer.open(request("Hi.", sampling=Sampling(max_frames=1)))
    probe.add_listener(lambda: idle.set() if probe.finish_reason else None)
    assert idle.wait(30)
    assert synthesizer.info()["active"] == 0


def test_chunks_grow_along_the_ramp_and_fit_their_codes(synthesizer: Synthesizer) -> None:
    chunks = list(synthesizer.stream(request()))
    assert [len(chunk.codes) for chunk in chunks] == [1, 2, 4, 8, 5]
    assert all(chunk.samples.dtype == np.float32 and len(chunk.samples) == 1920 * len(chunk.codes) for chunk in chunks)
    assert all(np.abs(chunk.samples).max() <= 1 for chunk in chunks)
    assert codes_of(chunks).shape == (20, 16)


def test_another_seed_gives_other_codes(synthesizer: Synthesizer) -> None:
    first, again, other = (codes_of(list(synthesizer.stream(request(seed=seed)))) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_seed_is_drawn_and_told(synthesizer: Synthesizer) -> None:
    drawn = synthesizer.open(request(seed=None))
    codes = codes_of(list(drawn))
    assert np.array_equal(codes, codes_of(list(synthesizer.stream(request(seed=drawn.seed)))))
    assert drawn.seed != synthesizer.open(request(seed=None)).seed


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose widths are whole blocks of 8-bit weights."""
    talker, predictor = make_checkpoint._talker_widths, make_checkpoint._predictor_config
    with pytest.MonkeyPatch.context() as patch:
        widths = {"hidden_size": 96, "intermediate_size": 224}
        patch.setattr(make_checkpoint, "_talker_widths", lambda preset: talker(preset) | widths)
        narrower = {"hidden_size": 64, "intermediate_size": 160}
        patch.setattr(make_checkpoint, "_predictor_config", lambda *args: predictor(*args) | narrower)
        return make_checkpoint.make_checkpoint(tmp_path_factory.mktemp("blocks") / "checkpoint", "tiny")


def test_widths_that_8_bits_cannot_hold_are_refused(tiny) -> None:
    with pytest.raises(RequestError, match=r"talker\.hidden is 72: q8_0 needs a multiple of 32") as error:
        Synthesizer.from_pretrained(tiny("custom_voice"), dtype="q8_0")
    assert error.value.param == "dtype"
    with pytest.raises(RequestError, match="'int3' is not one of float32, bfloat16, q8_0"):
        Synthesizer.from_pretrained(tiny("custom_voice"), dtype="int3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "q8_0"])
def test_company_changes_neither_codes_nor_samples(blocks: Path, dtype: str) -> None:
    requests = [request(TEXT[: 10 + 5 * i], seed=i, sampling=Sampling(max_frames=10 + 3 * i)) for i in range(7)]
    with Synthesizer.from_pretrained(blocks, dtype=dtype, lanes=1) as one:
        alone = [list(one.stream(item)) for item in requests]
    with Synthesizer.from_pretrained(blocks, dtype=dtype, lanes=3) as three:
        assert three.info()["dtype"] == dtype
        together = [list(utterance) for utterance in [three.open(item) for item in requests]]
    for number, (expected, got) in enumerate(zip(alone, together, strict=True)):
        assert np.array_equal(codes_of(expected), codes_of(got)), f"utterance {number} has other codes in company"
        assert np.array_equal(samples_of(expected), samples_of(got)), f"utterance {number} has other samples"


def test_streams_interleave_in_one_thread(synthesizer: Synthesizer) -> None:
    expected = [codes_of(list(synthesizer.stream(request(seed=seed)))) for seed in (1, 2)]
    streams = [synthesizer.stream(request(seed=seed)) for seed in (1, 2)]
    chunks = [[next(stream) for stream in streams] for _ in range(5)]
    for number in range(2):
        assert np.array_equal(codes_of([pair[number] for pair in chunks]), expected[number])


def test_many_threads_and_more_requests_than_lanes(synthesizer: Synthesizer) -> None:
    expected = {seed: codes_of(list(synthesizer.stream(request(seed=seed)))) for seed in range(8)}
    results: queue.Queue[tuple[int, np.ndarray]] = queue.Queue()

    def speak(seed: int) -> None:
        results.put((seed, codes_of(list(synthesizer.stream(request(seed=seed))))))

    threads = [threading.Thread(target=speak, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results.qsize() == 8
    while not results.empty():
        seed, codes = results.get()
        assert np.array_equal(codes, expected[seed]), f"seed {seed}"


# live text


def push_all(utterance: Utterance, pieces: list[str]) -> list[Chunk]:
    for piece in pieces:
        utterance.push_text(piece)
    utterance.end_text()
    return list(utterance)


@pytest.mark.parametrize("cut", [1, 3, 7, 100])
def test_live_text_gives_the_codes_of_the_whole_text(synthesizer: Synthesizer, cut: int) -> None:
    sampling = Sampling(max_frames=40)
    whole = codes_of(list(synthesizer.stream(request(sampling=sampling, text_mode="streamed"))))
    pieces = [TEXT[i : i + cut] for i in range(0, len(TEXT), cut)]
    live = push_all(synthesizer.open(request(None, sampling=sampling)), pieces)
    assert np.array_equal(codes_of(live), whole)


def test_live_text_speaks_before_its_end_and_waits_without_disturbing(synthesizer: Synthesizer) -> None:
    sampling = Sampling(max_frames=40)
    whole = codes_of(list(synthesizer.stream(request(sampling=sampling, text_mode="streamed"))))
    live = synthesizer.open(request(None, sampling=sampling))
    live.push_text(TEXT[:20])
    chunks = [next(iter(live))]  # audio although the text is open
    other = codes_of(list(synthesizer.stream(request(seed=5))))  # speaks to its end while the live lane waits
    assert live.finish_reason is None
    chunks += push_all(live, [TEXT[20:]])
    assert np.array_equal(codes_of(chunks), whole)
    assert np.array_equal(other, codes_of(list(synthesizer.stream(request(seed=5)))))


def test_a_waiting_live_utterance_hands_out_every_frame_that_its_text_allows(
    synthesizer: Synthesizer,
) -> None:
    """With n ids known, n - 1 frames can be made: a frame is made together with the text that follows it."""
    live = synthesizer.open(request(None, sampling=Sampling(max_frames=40)))
    live.push_text("a b c d e f g h ")
    known = len(live.text_ids()[0])
    frames = 0
    for chunk in live:
        frames += len(chunk.codes)
        if frames == known - 1:
            break
    list(synthesizer.stream(request("Hi.")))  # the engine had time for more, and no text for it
    assert known >= 8
    assert live.poll() is None
    live.cancel()


def test_live_text_on_a_cloned_voice_waits_for_the_text_beside_its_reference(base: Synthesizer, recording) -> None:
    voice = base.clone(recording, 16000, "Hi.")
    fields = {"voice": voice, "sampling": Sampling(max_frames=30)}
    whole = codes_of(list(base.stream(request(text_mode="streamed", **fields))))
    live = push_all(base.open(request(None, **fields)), [TEXT[i : i + 4] for i in range(0, len(TEXT), 4)])
    assert np.array_equal(codes_of(live), whole)
    short = codes_of(list(base.stream(request("Yes.", text_mode="streamed", **fields))))
    assert np.array_equal(codes_of(push_all(base.open(request(None, **fields)), ["Yes", "."])), short)


def test_live_text_that_never_comes_ends_without_audio(synthesizer: Synthesizer) -> None:
    live = synthesizer.open(request(None))
    assert push_all(live, [" ", "\n"]) == []
    assert live.finish_reason == "stop"
    assert live.finished


def test_bad_live_text_is_refused_and_nothing_is_lost(synthesizer: Synthesizer) -> None:
    sampling = Sampling(max_frames=40)
    whole = codes_of(list(synthesizer.stream(request(sampling=sampling, text_mode="streamed"))))
    live = synthesizer.open(request(None, sampling=sampling))
    live.push_text(TEXT[:9])
    for bad in ("\x07", "\ud800"):
        with pytest.raises(RequestError, match="position"):
            live.push_text("fine until here" + bad)
    assert np.array_equal(codes_of(push_all(live, [TEXT[9:]])), whole)
    with pytest.raises(RequestError, match="after its end"):
        live.push_text("more")
    with pytest.raises(ValueError, match="text=None"):
        synthesizer.open(request()).push_text("more")


def test_live_text_has_the_length_limit_of_any_text(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, max_characters=10) as synthesizer:
        live = synthesizer.open(request(None))
        live.push_text("123456789 ")
        with pytest.raises(RequestError, match="too long"):
            live.push_text("x")
        live.end_text()
        assert list(live)


# ends


def test_finish_reasons(synthesizer: Synthesizer) -> None:
    by_bound = synthesizer.open(request(sampling=Sampling(max_frames=3)))
    assert len(codes_of(list(by_bound))) == 3
    assert by_bound.finish_reason == "length"
    by_model = synthesizer.open(request(sampling=Sampling(temperature=20.0, top_k=0, max_frames=2000)))
    assert len(codes_of(list(by_model))) < 2000
    assert by_model.finish_reason == "stop"


def test_an_end_code_is_not_audio(synthesizer: Synthesizer) -> None:
    chunks = list(synthesizer.stream(request(sampling=Sampling(temperature=20.0, top_k=0, max_frames=2000))))
    assert synthesizer.config.ids.codec_eos not in codes_of(chunks)[:, 0]


def test_without_a_bound_the_text_sets_one(synthesizer: Synthesizer) -> None:
    utterance = synthesizer.open(request("Hi.", sampling=Sampling(greedy=True)))
    frames = len(codes_of(list(utterance)))
    ids = len(synthesizer.planner.tokenizer.encode("Hi."))
    assert utterance.finish_reason == "stop" or frames == 64 + 16 * ids


@pytest.mark.parametrize("way", ["close", "with", "forget", "cancel"])
def test_leaving_a_stream_frees_its_lane_within_a_frame(tiny, way: str) -> None:
    long = request(sampling=Sampling(max_frames=2000, greedy=True))
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, lead=0.08) as synthesizer:
        if way == "cancel":
            utterance = synthesizer.open(long)
            next(iter(utterance))
            utterance.cancel()
            assert list(utterance) == []
            assert utterance.finish_reason == "cancelled"
        else:
            stream = synthesizer.stream(long)
            next(stream)
            if way == "close":
                stream.close()
            elif way == "with":
                with stream:
                    pass
            else:
                del stream
                gc.collect()
        assert len(list(synthesizer.stream(request()))) == 5  # the only lane is free again


def test_cancelling_drops_what_was_not_taken(synthesizer: Synthesizer) -> None:
    utterance, ended = synthesizer.open(request()), threading.Event()
    utterance.add_listener(lambda: ended.set() if utterance.finish_reason else None)
    assert ended.wait(30)
    assert utterance.waiting_frames == 20
    utterance.cancel()
    assert utterance.poll() is None
    assert utterance.finished
    assert utterance.waiting_frames == 0


def test_cancelling_in_the_queue(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, lead=0.08) as synthesizer:
        first = synthesizer.open(request(sampling=Sampling(max_frames=2000, greedy=True)))
        queued = synthesizer.open(request())
        queued.cancel()
        assert list(queued) == []
        assert queued.finish_reason == "cancelled"
        first.cancel()
        assert list(first) == []


def test_a_listener_that_lags_pauses_its_lane_only(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=2) as synthesizer:
        sampling = Sampling(max_frames=200, greedy=True)
        expected = codes_of(list(synthesizer.stream(request(sampling=sampling))))
        lagging = synthesizer.open(request(sampling=sampling), lead=0.4)
        chunks = [next(iter(lagging))]
        list(synthesizer.stream(request(seed=9)))
        assert lagging.waiting_frames < 5 + 8, "the lane went on though nobody listened"
        assert lagging.finish_reason is None
        chunks += list(lagging)
        assert np.array_equal(codes_of(chunks), expected)


# bad requests


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": ""}, "text", "empty"),
        ({"text": " \n\t "}, "text", "empty"),
        ({"text": "a\x00b"}, "text", "position 1"),
        ({"text": "a\udc80"}, "text", "surrogate"),
        ({"text": "x" * 4097}, "text", "4096"),
        ({"voice": "nobody"}, "voice", "ryan"),
        ({"voice": None}, "voice", "ryan"),
        ({"voice": Voice(np.zeros(3, np.float32))}, "voice", "base checkpoint"),
        ({"language": "klingon"}, "language", "english"),
        ({"language": "beijing_dialect"}, "language", "chinese"),
        ({"text_mode": "half"}, "text_mode", "streamed"),
        ({"instruction": "x\x01"}, "instruction", "position 1"),
    ],
)
def test_bad_requests_name_the_field_and_the_choices(synthesizer: Synthesizer, fields, param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        synthesizer.stream(request(**fields))
    assert caught.value.param == param
    assert len(list(synthesizer.stream(request()))) == 5


def test_what_a_kind_lacks_is_refused(synthesizer: Synthesizer, base: Synthesizer, recording) -> None:
    with pytest.raises(RequestError, match="takes no instruction"):
        base.stream(request(voice=base.clone(recording, 16000), instruction="Whisper."))
    with pytest.raises(RequestError, match="clone"):
        base.stream(request(voice=None))
    with pytest.raises(RequestError, match="no named voices"):
        base.stream(request(voice="ryan"))
    with pytest.raises(RequestError, match="base checkpoint"):
        synthesizer.clone(recording, 16000)
    with pytest.raises(RequestError, match="streamed"):
        synthesizer.open(request(None, text_mode="whole"))
    with pytest.raises(RequestError, match="open"):
        synthesizer.stream(request(None))
    wide = Voice(np.zeros(base.config.spec.talker.hidden + 1, np.float32))
    with pytest.raises(RequestError, match="another checkpoint"):
        base.stream(request(voice=wide))


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}, {"max_frames": 0}, {"repetition_penalty": 0},
     {"predictor_temperature": float("nan")}, {"temperature": float("inf")}],
)  # fmt: skip
def test_bad_sampling_is_refused(values) -> None:
    with pytest.raises(RequestError) as caught:
        Sampling(**values)
    assert caught.value.param in values


def test_text_that_does_not_fit_is_refused_or_bounded(tiny) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=2, positions=40) as synthesizer:
        with pytest.raises(RequestError, match="in parts"):
            synthesizer.stream(request(TEXT * 4))
        bounded = synthesizer.open(request("Hi.", sampling=Sampling(max_frames=100, greedy=True)))
        beside = codes_of(list(synthesizer.stream(request("Oh.", sampling=Sampling(max_frames=5)))))
        frames = len(codes_of(list(bounded)))
        assert bounded.finish_reason == "length"
        assert 0 < frames < 40
        assert len(beside) == 5
        assert len(codes_of(list(synthesizer.stream(request("Oh.", sampling=Sampling(max_frames=5)))))) == 5


@pytest.mark.parametrize(
    ("samples", "rate", "text", "words"),
    [
        (np.zeros((2, 24000), np.float32), 24000, None, "mono"),
        (np.full(48000, np.nan, np.float32), 24000, None, "finite"),
        (np.zeros(100, np.float32), 24000, None, "seconds|lasts"),
        (np.zeros(24000 * 31, np.float32), 24000, None, "lasts"),
        (np.zeros(48000, np.float32), 0, None, "positive rate"),
        (np.zeros(48000, np.float32), 24000, " ", "transcript is empty"),
    ],
)
def test_bad_recordings_are_refused(base: Synthesizer, samples, rate: int, text, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        base.clone(samples, rate, text)


# faults


@pytest.mark.parametrize("stage", ["step", "prefill", "codec"])
def test_a_fault_ends_what_it_hits_and_the_next_request_is_served(tiny, monkeypatch, stage: str) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=2) as synthesizer:
        owner, name = {
            "step": (synthesizer.decoder, "step"),
            "prefill": (synthesizer.decoder, "prefill"),
            "codec": (synthesizer.codec, "decode"),
        }[stage]
        with monkeypatch.context() as patch:

            def broken(*_args, **_kwargs):
                raise RuntimeError("a wire came loose")

            patch.setattr(owner, name, broken)
            with pytest.raises(EngineError, match="a wire came loose"):
                list(synthesizer.stream(request()))
        assert len(list(synthesizer.stream(request()))) == 5


def test_a_full_cache_in_a_prompt_is_a_request_error(tiny, monkeypatch) -> None:
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1) as synthesizer:

        def full(*_args):
            raise CacheFullError("full")

        monkeypatch.setattr(synthesizer.decoder, "prefill", full)
        with pytest.raises(RequestError, match="in parts"):
            list(synthesizer.stream(request()))


def test_closing_ends_every_utterance_and_refuses_new_ones(tiny) -> None:
    synthesizer = Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, lead=0.08)
    speaking = synthesizer.open(request(sampling=Sampling(max_frames=2000, greedy=True)))
    queued = synthesizer.open(request())
    next(iter(speaking))
    synthesizer.close()
    synthesizer.close()
    for utterance in (speaking, queued):
        with pytest.raises(EngineError, match="closed"):
            list(utterance)
    with pytest.raises(EngineError, match="closed"):
        synthesizer.stream(request())


def test_a_program_may_end_while_it_speaks(tiny) -> None:
    program = f"""
from backend import Synthesizer, SpeechRequest
stream = Synthesizer.from_pretrained({str(tiny("custom_voice"))!r}).stream(SpeechRequest("Hello.", voice="ryan"))
print(len(next(stream).samples))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1920\n", "")


def test_a_call_runs_on_the_thread_that_computes(synthesizer: Synthesizer) -> None:
    assert synthesizer.call(threading.current_thread).name == "qwen3-tts-lanes"

    def broken() -> None:
        raise KeyError("what it raises")

    with pytest.raises(KeyError, match="what it raises"):
        synthesizer.call(broken)
    assert len(list(synthesizer.stream(request()))) == 5


def test_everything_is_computed_on_one_thread(tiny, monkeypatch) -> None:
    """The OpenMP threads of a second one would slow every frame (docs/notebook.md)."""
    from backend import synthesizer as module

    seen: set[str] = set()

    def watched(function):
        def watch(*args, **kwargs):
            seen.add(threading.current_thread().name)
            return function(*args, **kwargs)

        return watch

    for name in ("make_decoder", "TextTable", "Codec"):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1) as synthesizer:
        for owner, name in ((synthesizer.decoder, "prefill"), (synthesizer.decoder, "step")):
            monkeypatch.setattr(owner, name, watched(getattr(owner, name)))
        monkeypatch.setattr(synthesizer.codec, "decode", watched(synthesizer.codec.decode))
        list(synthesizer.stream(request()))
    assert seen == {"qwen3-tts-lanes"}


def test_loading_that_fails_raises_where_it_was_asked_for(tiny, monkeypatch) -> None:
    from backend import synthesizer as module

    def broken(*_args, **_options):
        raise MemoryError("no room")

    monkeypatch.setattr(module, "make_decoder", broken)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        Synthesizer.from_pretrained(tiny("custom_voice"))
    assert threading.active_count() == before


def test_everything_is_warm_before_a_synthesizer_is_there(tiny, monkeypatch) -> None:
    from megakernel import Decoder

    order: list[str] = []
    monkeypatch.setattr(Decoder, "warm_up", lambda _, progress: progress("a frame") or order.append("decoder"))
    monkeypatch.setattr(Codec, "warm_up", lambda _, progress: progress("a chunk") or order.append("codec"))
    with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1) as synthesizer:
        order.append("there")
        assert list(synthesizer.stream(request(sampling=Sampling(max_frames=1))))
    assert order == ["decoder", "codec", "there"]


def test_a_fault_while_warming_up_is_raised_where_the_synthesizer_was_asked_for(tiny, monkeypatch) -> None:
    from megakernel import Decoder

    monkeypatch.setattr(Decoder, "fault", torch.ones(1, dtype=torch.int32))

    def check(_, fault: int) -> None:
        assert fault == 1
        raise KernelFaultError("talk")

    monkeypatch.setattr(Decoder, "check", check)
    before = threading.active_count()
    with pytest.raises(EngineError, match=r"warming up: .* stage talk"):
        Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1)
    assert threading.active_count() == before


@pytest.mark.parametrize(("engine", "words"), [("kernel", "cannot run here"), ("fast", "auto, kernel, twin")])
@pytest.mark.usefixtures("no_interpreter")
def test_an_engine_that_is_not_there_is_refused_before_anything_is_loaded(tiny, engine: str, words: str) -> None:
    before = threading.active_count()
    with pytest.raises(RequestError, match=words) as caught:
        Synthesizer.from_pretrained(tiny("custom_voice"), engine=engine)
    assert caught.value.param == "engine"
    assert threading.active_count() == before


def test_the_engine_is_the_one_that_was_asked_for(tiny, monkeypatch) -> None:
    from backend import synthesizer as module

    asked: list[str] = []
    make = module.make_decoder

    def spy(*args, engine: str, **options):
        asked.append(engine)
        return make(*args, engine="twin", **options)

    monkeypatch.setattr(module, "make_decoder", spy)
    for engine in ("auto", "twin"):
        with Synthesizer.from_pretrained(tiny("custom_voice"), lanes=1, engine=engine):
            pass
    assert asked == ["auto", "twin"], "the choice is made where the model is known"


def test_polling_with_a_listener(synthesizer: Synthesizer) -> None:
    utterance = synthesizer.open(request())
    changed = threading.Event()
    utterance.add_listener(changed.set)
    chunks = []
    while not utterance.finished:
        assert changed.wait(30)
        changed.clear()
        while (chunk := utterance.poll()) is not None:
            chunks.append(chunk)
    assert np.array_equal(codes_of(chunks), codes_of(list(synthesizer.stream(request()))))
    assert utterance.poll() is None


def count_tensors() -> int:
    """By type: asking an object may run code of its own, or find it gone."""
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def test_two_hundred_utterances_leave_no_tensor_behind(synthesizer: Synthesizer) -> None:
    one_frame = Sampling(max_frames=1)
    list(synthesizer.stream(request(sampling=one_frame)))
    settle(synthesizer)
    gc.collect()
    before = count_tensors()
    for seed in range(200):
        list(synthesizer.stream(request(seed=seed, sampling=one_frame)))
    settle(synthesizer)
    gc.collect()
    assert count_tensors() <= before + 2


def test_info_is_plain_and_says_that_the_voice_is_noise(synthesizer: Synthesizer) -> None:
    import json

    info = json.loads(json.dumps(synthesizer.info()))
    assert info["voice_is_noise"] is True
    assert info["engine"] == "twin"
    assert info["lanes"] == 3
    assert info["running"] is True
    assert info["healthy"] is True and info["fault"] is None
    assert info["model"] == synthesizer.checkpoint.directory.name
    assert info["sample_rate"] == 24000
