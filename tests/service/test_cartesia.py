"""`/tts/websocket` with a bare client: contexts, live text, cancels, flushes, bad input, leaving."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import soxr
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from backend import Sampling, SpeechRequest, Synthesizer, Utterance
from backend.errors import EngineError
from service.cartesia import Connection
from service.pcm import pcm_alaw, pcm_f32le, pcm_mulaw, pcm_s16le
from service.settings import Settings
from tests.service.engine_fixtures import spoken
from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn, chunk

TEXT = "Good morning, how are you?"
FOREVER = 1500  # frames: two minutes, which no test waits for


class Client:
    """A Cartesia client in a few lines."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    def say(self, context: str | None, transcript: str = "", more: bool = False, **fields: Any) -> None:
        defaults = {"seed": 3, "max_new_tokens": 12}
        message = {"context_id": context, "transcript": transcript, "continue": more, **defaults, **fields}
        self.socket.send(json.dumps(message))

    def cancel(self, context: str) -> None:
        self.socket.send(json.dumps({"context_id": context, "cancel": True}))

    def hear(self) -> dict[str, Any]:
        return json.loads(self.socket.recv(timeout=20))

    def hear_all(self, *contexts: str) -> dict[str, list[dict[str, Any]]]:
        """Messages by context until each context is done."""
        heard: dict[str, list[dict[str, Any]]] = {name: [] for name in contexts}
        while not all(messages and messages[-1]["done"] for messages in heard.values()):
            message = self.hear()
            heard[message["context_id"]].append(message)
        return heard

    def audio(self, context: str) -> bytes:
        return audio(self.hear_all(context)[context])


def audio(messages: list[dict[str, Any]]) -> bytes:
    assert messages[-1]["type"] == "done", messages[-1]
    return b"".join(base64.b64decode(m["data"]) for m in messages if m["type"] == "chunk")


def request(engine: Synthesizer, text: str = TEXT, **fields: Any) -> SpeechRequest:
    given: dict[str, Any] = {
        "voice": engine.voices[0],
        "seed": 3,
        "sampling": Sampling(max_frames=12),
        **fields,
    }
    return SpeechRequest(text, **given)


@pytest.fixture
def client(server: ThreadServer) -> Iterator[Client]:
    with connect(server.websocket_url) as socket:
        yield Client(socket)


@pytest.fixture
def still(still_server: ThreadServer) -> Iterator[Client]:
    with connect(still_server.websocket_url, max_size=None) as socket:
        yield Client(socket)


def test_one_message_is_a_whole_request(engine: Synthesizer, client: Client):
    client.say("a", TEXT, voice={"mode": "id", "id": engine.voices[1]}, language="en-US")
    messages = client.hear_all("a")["a"]
    assert [m["type"] for m in messages] == ["chunk"] * 4 + ["done"]
    assert all(m["status_code"] == 206 and m["done"] is False and m["step_time"] >= 0 for m in messages[:-1])
    assert messages[-1] == {"type": "done", "context_id": "a", "done": True, "status_code": 200}
    assert audio(messages) == spoken(engine, request(engine, voice=engine.voices[1], language="english"))


def test_text_in_pieces_sounds_like_the_whole(engine: Synthesizer, client: Client):
    for piece in ("Goo", "d morn", "ing,", " how", " are you"):
        client.say("a", piece, more=True)
    client.say("a", "?")
    assert client.audio("a") == spoken(engine, request(engine, text_mode="streamed"))


def test_audio_comes_while_text_is_still_missing(engine: Synthesizer, client: Client):
    """The first chunk is there before the client has said its last words."""
    client.say("a", "Good morning, how", more=True)
    first = client.hear()
    assert first["type"] == "chunk"
    client.say("a", " are you?")
    rest = client.hear_all("a")["a"]
    assert audio([first, *rest]) == spoken(engine, request(engine, text_mode="streamed"))


def test_sentences_are_joined_with_a_space(stand_in: StandIn, still: Client):
    for sentence in ("One.", "Two.", "三。", "四。"):
        still.say("a", sentence, more=True, max_buffer_delay_ms=0)
    still.say("a", max_buffer_delay_ms=0)
    utterance = stand_in.take()
    utterance.finish("stop")
    still.hear_all("a")
    assert "".join(stand_in.texts[0].pieces) == "One. Two.三。四。"


def test_tokens_are_joined_as_they_are(stand_in: StandIn, still: Client):
    for token in ("3.", "14", " is", " pi."):
        still.say("a", token, more=True)
    still.say("a", " ")
    stand_in.take().finish("stop")
    still.hear_all("a")
    assert "".join(stand_in.texts[0].pieces).strip() == "3.14 is pi."


def test_contexts_share_a_socket(engine: Synthesizer, client: Client):
    """Three contexts over two lanes, text interleaved: each hears only itself."""
    texts = {"a": "One thing.", "b": "Another thing.", "c": "A third."}
    for name, text in texts.items():
        client.say(name, text[:4], more=True)
    for name, text in texts.items():
        client.say(name, text[4:])
    heard = client.hear_all(*texts)
    for name, text in texts.items():
        assert audio(heard[name]) == spoken(engine, request(engine, text, text_mode="streamed")), name


@pytest.mark.parametrize(
    ("encoding", "pack"), [("pcm_f32le", pcm_f32le), ("pcm_mulaw", pcm_mulaw), ("pcm_alaw", pcm_alaw)]
)
def test_encodings(engine: Synthesizer, client: Client, encoding: str, pack: Any):
    client.say("a", TEXT, output_format={"container": "raw", "encoding": encoding, "sample_rate": 24_000})
    samples = np.concatenate([part.samples for part in engine.stream(request(engine))])
    assert client.audio("a") == pack(samples)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_sample_rates(engine: Synthesizer, client: Client, rate: int):
    client.say("a", TEXT, output_format={"container": "raw", "encoding": "pcm_f32le", "sample_rate": rate})
    received = np.frombuffer(client.audio("a"), "<f4")
    samples = np.concatenate([part.samples for part in engine.stream(request(engine))])
    expected = soxr.resample(samples, 24_000, rate)
    assert received.shape == expected.shape and np.abs(received - expected).max() < 1e-4


def test_flush_is_answered_and_the_context_goes_on(engine: Synthesizer, client: Client):
    client.say("a", "One thing.", more=True, flush=True)
    client.say("a", " Another thing.")
    messages = client.hear_all("a")["a"]
    [at] = [i for i, m in enumerate(messages) if m["type"] == "flush_done"]
    assert messages[at]["flush_id"] == 1 and messages[at]["flush_done"] is True
    assert audio([*messages[:at], messages[-1]]) == spoken(engine, request(engine, "One thing.", text_mode="streamed"))
    assert audio(messages[at + 1 :]) == spoken(engine, request(engine, "Another thing."))


@pytest.mark.parametrize("transcript", ["", " "])
def test_the_end_of_an_unknown_context_is_done(client: Client, transcript: str):
    client.say("never seen", transcript)
    assert client.hear() == {"type": "done", "context_id": "never seen", "done": True, "status_code": 200}


def test_without_a_name_a_context_gets_one(client: Client):
    client.say(None, TEXT)
    name = client.hear()["context_id"]
    assert name and client.hear_all(name)


def test_cancel_in_the_middle(stand_in: StandIn, still: Client):
    stand_in.on_open = lambda utterance: utterance.deliver(chunk())
    still.say("a", "One.", more=True)
    assert still.hear()["type"] == "chunk"
    still.cancel("a")
    assert stand_in.freed.get(timeout=10) is stand_in.take()
    assert still.hear()["type"] == "done"


def test_cancel_before_the_first_chunk_and_of_nothing(stand_in: StandIn, still: Client):
    still.cancel("never seen")
    still.say("a", "One.")
    still.cancel("a")
    assert stand_in.freed.get(timeout=10) is stand_in.take()
    assert still.hear() == {"type": "done", "context_id": "a", "done": True, "status_code": 200}


def test_a_cancelled_name_can_be_used_again(engine: Synthesizer, client: Client):
    client.say("a", TEXT, max_new_tokens=FOREVER)
    assert client.hear()["type"] == "chunk"
    client.cancel("a")
    client.say("a", TEXT)
    client.hear_all("a")
    assert client.audio("a") == spoken(engine, request(engine))


class GatedSocket:
    """A websocket whose client reads only when the gate is open."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.stuck, self.gate = asyncio.Event(), asyncio.Event()

    def say(self, **message: Any) -> None:
        self.incoming.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})

    async def receive(self) -> dict[str, Any]:
        return await self.incoming.get()

    async def send_text(self, text: str) -> None:
        self.stuck.set()
        await self.gate.wait()
        self.sent.put_nowait(json.loads(text))


def test_a_name_used_again_is_heard_after_its_first_end(stand_in: StandIn):
    """The first context is stuck in a send when it is cancelled; its last word comes before the second's first."""
    stand_in.on_open = lambda utterance: utterance.deliver(chunk())

    async def play() -> list[str]:
        gated = GatedSocket()
        connection = asyncio.create_task(Connection(gated, stand_in, Settings()).run())  # type: ignore[arg-type]
        gated.say(context_id="a", transcript="One.")
        await gated.stuck.wait()
        gated.say(context_id="a", cancel=True)
        gated.say(context_id="a", transcript="Two.")
        await asyncio.to_thread(stand_in.take)
        (await asyncio.to_thread(stand_in.take)).finish("stop")
        for _ in range(20):
            await asyncio.sleep(0)  # all that can go on without the client has gone on
        gated.gate.set()
        heard = [(await gated.sent.get())["type"] for _ in range(4)]
        gated.incoming.put_nowait({"type": "websocket.disconnect"})
        await connection
        return heard

    assert asyncio.run(play()) == ["chunk", "done", "chunk", "done"]


def test_cancel_frees_the_lane_for_the_next(engine: Synthesizer, client: Client):
    """Both lanes speak and a third context waits; cancelled, all three."""
    for name in "abc":
        client.say(name, TEXT, max_new_tokens=FOREVER)
    client.hear()
    for name in "abc":
        client.cancel(name)
    client.hear_all(*"abc")
    client.say("d", TEXT)
    assert client.audio("d") == spoken(engine, request(engine))


def flood(utterance: Utterance) -> None:
    for _ in range(50):
        utterance.deliver(chunk(frames=150))


PHASES = {
    "waiting for text": lambda utterance: None,
    "between chunks": lambda utterance: utterance.deliver(chunk()),
    "in a send": flood,
}


@pytest.mark.parametrize("is_polite", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_leaving_frees_the_lanes(stand_in: StandIn, still_server: ThreadServer, phase: str, is_polite: bool):
    stand_in.on_open = PHASES[phase]
    with connect(still_server.websocket_url, max_size=None, close_timeout=0.5) as socket:
        client = Client(socket)
        client.say("a", "One", more=True)
        client.say("b", "Two.")
        if phase != "waiting for text":
            client.hear()
        opened = [stand_in.take(), stand_in.take()]
        if not is_polite:
            break_off(socket)
    freed = [stand_in.freed.get(timeout=10), stand_in.freed.get(timeout=10)]
    assert set(map(id, freed)) == set(map(id, opened))


def break_off(connection: ClientConnection) -> None:
    connection.socket.shutdown(socket.SHUT_RDWR)


def test_lanes_left_by_clients_serve_the_next(engine: Synthesizer, server: ThreadServer, client: Client):
    with connect(server.websocket_url) as socket:
        for name in "abc":
            Client(socket).say(name, TEXT, max_new_tokens=FOREVER)
        Client(socket).hear()
    client.say("d", TEXT)
    assert client.audio("d") == spoken(engine, request(engine))


def test_a_client_that_takes_nothing_is_dropped(stand_in: StandIn):
    stand_in.on_open = flood
    with (
        serving(stand_in, send_timeout_seconds=0.2) as running,
        connect(running.websocket_url, max_queue=1, close_timeout=0.1) as socket,
    ):
        Client(socket).say("a", "One.")
        assert stand_in.freed.get(timeout=10) is stand_in.take()


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"voice": {"mode": "id", "id": "nobody"}}, "voice", "nobody"),
        ({"voice": {"mode": "embedding"}}, "voice.mode", "id"),
        ({"voice": "nobody"}, "voice", ""),
        ({"language": "klingon"}, "language", "english"),
        ({"output_format": {"container": "wav"}}, "output_format.container", "raw"),
        ({"output_format": {"encoding": "mp3"}}, "output_format.encoding", "pcm_alaw"),
        ({"output_format": {"sample_rate": 7}}, "output_format.sample_rate", "8000"),
        ({"transcript": "a\x07b"}, "text", "U+0007"),
        ({"transcript": "a\ud800b"}, "text", "surrogate"),
        ({"transcript": "x" * 4097}, "input", "4096"),
        ({"transcript": 5}, "transcript", "string"),
        ({"transcript": None}, "transcript", "string"),
        ({"continue": "yes"}, "continue", "boolean"),
        ({"cancel": 1}, "cancel", "boolean"),
        ({"seed": -1}, "seed", ""),
        ({"temperature": -1.0}, "temperature", ""),
        ({"context_id": 7}, "context_id", "string"),
        ({"context_id": "x" * 300}, "context_id", "256"),
    ],
)
@pytest.mark.parametrize("more", [False, True])
def test_bad_fields_are_named_and_the_socket_lives(
    engine: Synthesizer, client: Client, fields: dict[str, Any], param: str, word: str, more: bool
):
    client.say("bad", **{"transcript": TEXT, "more": more, **fields})
    error = client.hear()
    assert (error["type"], error["status_code"], error["done"]) == ("error", 400, True), error
    assert error["context_id"] == (None if param == "context_id" else "bad")
    assert error["error_code"] == "bad_request" and error["title"] and word in error["message"]
    assert error["param"] == param
    client.say("good", TEXT)
    assert client.audio("good") == spoken(engine, request(engine))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", '"x"', "[" * 50_000, '{"seed": ' + "9" * 5000 + "}"])
def test_what_is_no_json_object_is_refused(client: Client, text: str):
    client.socket.send(text)
    assert client.hear()["type"] == "error"
    client.socket.send(b"\x00\x01")
    assert "JSON" in client.hear()["message"]
    client.say("x")
    assert client.hear()["type"] == "done"


def test_an_error_ends_a_running_context_and_only_it(stand_in: StandIn, still: Client):
    still.say("a", "One", more=True)
    still.say("b", "Two", more=True)
    one, two = stand_in.take(), stand_in.take()
    still.say("a", 5, more=True)  # type: ignore[arg-type]
    assert still.hear()["context_id"] == "a"
    assert stand_in.freed.get(timeout=10) is one and not two.cancelled


def test_text_after_the_end_is_an_error(stand_in: StandIn, still: Client):
    still.say("a", "One.")
    still.say("a", "")
    still.say("a", "Two.")
    error = still.hear()
    assert error["type"] == "error" and "continue" in error["message"]


def test_text_of_a_context_is_bounded_in_all(client: Client):
    client.say("a", "x " * 2000, more=True, max_new_tokens=1)
    client.say("a", "x " * 100, more=True)
    messages = client.hear_all("a")["a"]
    assert messages[-1]["type"] == "error" and "4096" in messages[-1]["message"]


def test_contexts_of_a_socket_are_bounded(stand_in: StandIn):
    with serving(stand_in, max_contexts=2) as running, connect(running.websocket_url) as socket:
        client = Client(socket)
        for name in "abc":
            client.say(name, "One", more=True)
        error = client.hear()
        assert (error["context_id"], error["status_code"]) == ("c", 429)


def test_a_message_over_the_limit_closes_the_socket(server: ThreadServer):
    with connect(server.websocket_url) as socket:
        socket.send(json.dumps({"padding": "x" * 140_000}))
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(timeout=10)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_a_failing_engine_is_an_error_of_its_context(stand_in: StandIn, still: Client):
    still.say("a", "One.")
    stand_in.take().fail(EngineError("secret detail"))
    error = still.hear()
    assert (error["type"], error["status_code"]) == ("error", 503) and "secret" not in error["message"]
    still.say("b", "Two.")
    stand_in.take().finish("stop")
    assert still.hear()["type"] == "done"


def test_samples_of_a_chunk_are_those_of_the_engine(stand_in: StandIn, still: Client):
    still.say("a", "One.")
    utterance = stand_in.take()
    utterance.deliver(chunk(value=0.25))
    assert base64.b64decode(still.hear()["data"]) == pcm_s16le(chunk(value=0.25).samples)
    utterance.finish("stop")
