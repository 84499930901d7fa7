"""`/v1/audio/speech` with OpenAI's own client and a bare one: samples, streaming, refusals, leaving."""

from __future__ import annotations

import io
import json
import socket
import wave
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from backend import Sampling, SpeechRequest, Synthesizer, Utterance
from backend.errors import EngineError
from service.openai_speech import OPENAI_VOICES, own_voice
from service.pcm import pcm_s16le, wav_header
from tests.service.engine_fixtures import SEED, spoken
from tests.service.serving import ThreadServer, serving
from tests.service.stand_in import StandIn, chunk

TEXT = "Good morning, how are you?"
FOREVER = 1500  # frames: two minutes, which no test waits for


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "tts",
        "input": TEXT,
        "seed": 3,
        "max_new_tokens": 12,
        "response_format": "pcm",
        **fields,
    }


def post(server: ThreadServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/speech", json=body(**fields), timeout=30)


def request(engine: Synthesizer, **fields: Any) -> SpeechRequest:
    given: dict[str, Any] = {
        "voice": engine.voices[0],
        "seed": 3,
        "sampling": Sampling(max_frames=12),
        **fields,
    }
    return SpeechRequest(TEXT, **given)


@pytest.fixture
def client(server: ThreadServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.mark.parametrize("form", ["pcm", "wav"])
def test_openai_client_receives_the_engines_samples(engine: Synthesizer, client: openai.OpenAI, form: Any):
    extra = {"seed": 3, "max_new_tokens": 12, "language": "en"}
    speech = client.audio.speech.with_streaming_response
    with speech.create(model="tts", voice="alloy", input=TEXT, response_format=form, extra_body=extra) as reply:
        received = b"".join(reply.iter_bytes())
        assert reply.headers["x-seed"] == "3"
    voice = own_voice("alloy", engine.voices)
    expected = spoken(engine, request(engine, voice=voice, language="english"))
    assert received == (wav_header() if form == "wav" else b"") + expected


def test_wav_is_the_default_and_playable(engine: Synthesizer, server: ThreadServer):
    reply = httpx.post(f"{server.url}/v1/audio/speech", json={"input": TEXT, "seed": 3, "max_new_tokens": 12})
    assert reply.headers["content-type"] == "audio/wav" and "content-length" not in reply.headers
    with wave.open(io.BytesIO(reply.content)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24_000, 1, 2)
    assert reply.content[44:] == spoken(engine, request(engine))


def test_extra_fields_reach_the_engine(engine: Synthesizer, server: ThreadServer):
    fields = {
        "text_mode": "streamed",
        "temperature": 0.5,
        "top_k": 5,
        "predictor_top_p": 0.9,
        "greedy": False,
    }
    reply = post(server, voice={"id": engine.voices[-1]}, unknown={"deep": [1]}, **fields)
    sampling = Sampling(max_frames=12, temperature=0.5, top_k=5, predictor_top_p=0.9)
    wanted = request(engine, voice=engine.voices[-1], text_mode="streamed", sampling=sampling)
    assert reply.content == spoken(engine, wanted)


def test_an_instruction_is_followed_or_refused(engine: Synthesizer, server: ThreadServer, deaf: Path):
    followed = post(server, instructions="softly").content
    assert followed == spoken(engine, request(engine, instruction="softly"))
    assert followed != spoken(engine, request(engine))
    with Synthesizer.from_pretrained(deaf, lanes=1) as other, serving(other) as running:
        reply = post(running, instructions="softly")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "instruction"


def test_the_servers_seed_is_for_requests_without(engine: Synthesizer, server: ThreadServer):
    reply = post(server, seed=None)
    assert reply.headers["x-seed"] == str(SEED)
    assert reply.content == spoken(engine, request(engine, seed=SEED))


def test_openai_voices_are_aliases_that_stay():
    voices = ["vivian", "Ryan", "echo"]
    assert own_voice("echo", voices) == "echo"
    assert {own_voice(name, voices) for name in OPENAI_VOICES} == set(voices)
    assert [own_voice(name, voices) for name in OPENAI_VOICES] == [
        own_voice(name, voices[::-1]) for name in OPENAI_VOICES
    ]
    assert own_voice(None, voices) == "vivian" and own_voice("nobody", voices) == "nobody"
    assert own_voice(None, []) is None and own_voice("alloy", []) is None


def test_lists(engine: Synthesizer, server: ThreadServer, client: openai.OpenAI):
    [model] = client.models.list().data
    assert httpx.get(f"{server.url}/v1/audio/models").json() == {"models": [{"id": model.id}]}
    voices = httpx.get(f"{server.url}/v1/audio/voices").json()["voices"]
    assert voices == [{"id": name, "name": name} for name in engine.voices]


def test_health_tells_that_the_voice_is_noise(server: ThreadServer):
    facts = httpx.get(f"{server.url}/health").json()
    assert facts["status"] == "ok" and facts["voice_is_noise"] is True and facts["lanes"] == 2


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"input": ""}, "text", ""),
        ({"input": " \n"}, "text", ""),
        ({"input": "x" * 4097}, "input", "4096"),
        ({"input": "a\x07b"}, "text", "U+0007"),
        ({"input": "a\ud800b"}, "text", "surrogate"),
        ({"input": None}, "input", "string"),
        ({"input": 5}, "input", "string"),
        ({"voice": "nobody"}, "voice", "nobody"),
        ({"voice": "\ud800"}, "voice", ""),
        ({"voice": ["a"]}, "voice", ""),
        ({"language": "klingon"}, "language", "english"),
        ({"seed": -1}, "seed", ""),
        ({"seed": "one"}, "seed", ""),
        ({"max_new_tokens": 0}, "max_frames", ""),
        ({"temperature": float("1e400")}, "temperature", ""),
        ({"text_mode": "backwards"}, "text_mode", ""),
        ({"response_format": "mp3"}, "response_format", "wav, pcm"),
        ({"stream_format": "sse"}, "stream_format", "audio"),
        ({"speed": 2}, "speed", "1.0"),
        ({"speed": 9}, "speed", ""),
    ],
)
def test_bad_fields_are_named(server: ThreadServer, fields: dict[str, Any], param: str, word: str):
    content = json.dumps(body(**fields)).encode()
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/audio/speech", content=content, headers=headers)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert word in error["message"] and error["message"]
    assert error["param"].partition(".")[0] == param


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 50_000, b'{"input": ' + b"9" * 5000 + b"}"],
)
def test_what_is_no_json_object_is_refused(server: ThreadServer, content: bytes):
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}/v1/audio/speech", content=content, headers=headers)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused(server: ThreadServer, chunked: bool):
    content = json.dumps(body(padding="x" * 140_000)).encode()
    headers = {"Content-Type": "application/json"}
    pieces = iter([content[:1000], content[1000:]]) if chunked else content
    reply = httpx.post(f"{server.url}/v1/audio/speech", content=pieces, headers=headers)
    assert reply.status_code == 413 and "131072" in reply.json()["error"]["message"]


def test_unknown_paths_have_openais_shape(server: ThreadServer):
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{server.url}/v1/audio/speech").status_code == 405


def test_openai_client_raises_its_own_error(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="klingon"):
        client.audio.speech.create(model="x", voice="alloy", input="hi", extra_body={"language": "klingon"})


def test_each_frame_arrives_before_the_next_exists(stand_in: StandIn, still_server: ThreadServer):
    """The engine's clock is the client's: a frame is made when the one before has been read."""
    levels = [0.1, 0.2, 0.3, 0.4]
    stand_in.on_open = lambda utterance: utterance.deliver(chunk(value=levels[0]))
    with httpx.stream("POST", f"{still_server.url}/v1/audio/speech", json=body()) as reply:
        utterance = stand_in.take()
        pieces = Pieces(reply)
        for level, following in zip(levels, [*levels[1:], None], strict=True):
            assert pieces.read(3840) == pcm_s16le(chunk(value=level).samples)
            if following is not None:
                utterance.deliver(chunk(value=following))
        utterance.finish("stop")
        assert pieces.read(1) == b""
    assert stand_in.leads == [10.0] and stand_in.freed.empty()


def test_an_engine_waits_for_a_slow_client_in_the_middle(engine: Synthesizer):
    """Ten seconds of speech; the buffers between hold three. With the first bytes read it is under way."""
    with serving(engine, lead_seconds=0.3) as running:
        running.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        small = httpx.HTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)])
        slow = httpx.Client(transport=small, timeout=30)
        with (
            slow,
            slow.stream("POST", f"{running.url}/v1/audio/speech", json=body(max_new_tokens=120)) as reply,
        ):
            pieces = Pieces(reply)
            first = pieces.read(3840)
            assert engine.info()["active"] == 1
            received = first + pieces.read(10**9)
    assert received == spoken(engine, request(engine, sampling=Sampling(max_frames=120)))


def test_a_failing_engine_gives_503(stand_in: StandIn, still_server: ThreadServer):
    stand_in.on_open = lambda utterance: utterance.fail(EngineError("secret detail"))
    reply = post(still_server)
    assert reply.status_code == 503 and reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text


def test_failing_later_breaks_the_connection_off(stand_in: StandIn, still_server: ThreadServer):
    stand_in.on_open = lambda utterance: utterance.deliver(chunk())
    with httpx.stream("POST", f"{still_server.url}/v1/audio/speech", json=body()) as reply:
        stand_in.take().fail(EngineError("late"))
        with pytest.raises(httpx.RemoteProtocolError):
            reply.read()


def flood(utterance: Utterance) -> None:
    """Ten minutes at once, more than all buffers hold."""
    for _ in range(50):
        utterance.deliver(chunk(frames=150))


PHASES = {
    "before the first chunk": lambda utterance: None,
    "between chunks": lambda utterance: utterance.deliver(chunk()),
    "in a send": flood,
}


@pytest.mark.parametrize("phase", PHASES)
def test_leaving_frees_the_lane(stand_in: StandIn, still_server: ThreadServer, phase: str):
    stand_in.on_open = PHASES[phase]
    with raw_post(still_server) as sock:
        utterance = stand_in.take()
        if phase != "before the first chunk":
            assert sock.recv(15) == b"HTTP/1.1 200 OK"
        assert not utterance.cancelled
    assert stand_in.freed.get(timeout=10) is utterance


def test_a_client_that_takes_nothing_is_dropped(stand_in: StandIn, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "qwen3_tts")
    stand_in.on_open = flood
    with serving(stand_in, send_timeout_seconds=0.2) as running, raw_post(running):
        assert stand_in.freed.get(timeout=10) is stand_in.take()
    assert "took nothing" in caplog.text and "Traceback" not in caplog.text


def test_lanes_left_by_clients_serve_the_next(engine: Synthesizer, server: ThreadServer):
    """Two lanes speak, one request waits; all three clients leave."""
    with raw_post(server, FOREVER) as one, raw_post(server, FOREVER) as two, raw_post(server, FOREVER):
        assert one.recv(12) == two.recv(12) == b"HTTP/1.1 200"
    assert post(server).content == spoken(engine, request(engine))


class Pieces:
    """A streamed body, read by the byte."""

    def __init__(self, reply: httpx.Response) -> None:
        self._raw = reply.iter_raw()
        self._held = b""

    def read(self, count: int) -> bytes:
        while len(self._held) < count and (piece := next(self._raw, b"")):
            self._held += piece
        taken, self._held = self._held[:count], self._held[count:]
        return taken


def raw_post(server: ThreadServer, frames: int = 12) -> socket.socket:
    """A request on a bare socket, which leaves when it is closed."""
    host, port = server.address.split(":")
    content = json.dumps(body(max_new_tokens=frames)).encode()
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
    sock = socket.create_connection((host, int(port)), timeout=10)
    sock.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return sock
