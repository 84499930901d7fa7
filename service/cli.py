"""The command `qwen3-tts`: speaks text, serves, makes random checkpoints, tells what a model is.

Errors are one line that says what to do: exit code 2 for what was asked, 1 for what failed. Heavy
imports wait until a command needs them.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer
from pydantic import ValidationError

from service import wav_output
from service.languages import language_name
from service.pcm import ENGINE_RATE
from service.settings import Settings

if TYPE_CHECKING:
    from backend import SpeechRequest, Synthesizer, Utterance

app = typer.Typer(name="qwen3-tts", help="Streaming speech from Qwen3-TTS.", no_args_is_help=True, add_completion=False)

Model = Annotated[str | None, typer.Option(help="Checkpoint directory or hub id; none: a small random one (noise).")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")]
Engine = Annotated[str | None, typer.Option(help="auto, kernel, or twin: the kernel's text in plain PyTorch.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or q8_0 (8 bits).")]
Offline = Annotated[bool | None, typer.Option("--offline/--online", help="Use only what is downloaded already.")]
Revision = Annotated[str | None, typer.Option(help="Revision of the hub id.")]


@app.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say; '-' or nothing: read standard input.")] = "-",
    output: Annotated[str, typer.Option("-o", "--output", help="A .wav or .pcm file; '-' is stdout.")] = "out.wav",
    model: Model = None,
    voice: Annotated[str | None, typer.Option(help="One of the model's voices; its first by default.")] = None,
    language: Annotated[str, typer.Option(help="A name or code (english, en), or auto.")] = "auto",
    instruction: Annotated[str | None, typer.Option(help="How to say it, for models that listen to it.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed says it the same way.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Speak standard input while it comes.")] = False,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest code.")] = False,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    predictor_temperature: Annotated[float | None, typer.Option()] = None,
    predictor_top_k: Annotated[int | None, typer.Option()] = None,
    predictor_top_p: Annotated[float | None, typer.Option()] = None,
    max_frames: Annotated[int | None, typer.Option(help="At most so many frames of 80 ms.")] = None,
    text_mode: Annotated[str | None, typer.Option(help="streamed or whole.")] = None,
    form: Annotated[
        str | None, typer.Option("--format", help="wav or pcm, where the file's name does not say.")
    ] = None,
    device: Device = None,
    engine: Engine = None,
    dtype: Dtype = None,
    offline: Offline = None,
    revision: Revision = None,
) -> None:
    """Say TEXT into a file, or onto stdout while it is spoken."""
    sampling = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "predictor_temperature": predictor_temperature,
        "predictor_top_k": predictor_top_k,
        "predictor_top_p": predictor_top_p,
        "max_frames": max_frames,
        "greedy": greedy,
    }
    with _one_line_errors():
        _check_choice("--text-mode", text_mode, ("streamed", "whole"))
        _check_choice("--format", form, ("wav", "pcm"))
        if live and text != "-":
            _fail("--live speaks standard input; leave TEXT out")
        words = None if live else (_read_input() if text == "-" else text)
        where = {"device": device, "engine": engine, "dtype": dtype}
        settings = _settings(model=model, **where, offline=offline, revision=revision, lanes=1)
        with _engine(settings) as synthesizer:
            request = _request(synthesizer, words, voice, language, instruction, seed, sampling, text_mode)
            utterance = synthesizer.open(request, lead=None)
            spoken = _LiveInput(utterance) if live else None
            _write_speech(utterance, output, cast("wav_output.Form | None", form))
            if spoken is not None:
                spoken.check()


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback it needs a key.")] = None,
    port: Annotated[int | None, typer.Option()] = None,
    model: Model = None,
    device: Device = None,
    engine: Engine = None,
    dtype: Dtype = None,
    lanes: Annotated[int | None, typer.Option(help="Utterances spoken at once.")] = None,
    seed: Annotated[int | None, typer.Option(help="For requests that name none.")] = None,
    lead_seconds: Annotated[float | None, typer.Option(help="Audio that may wait for a slow client.")] = None,
    max_input_chars: Annotated[int | None, typer.Option()] = None,
    offline: Offline = None,
    revision: Revision = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Serve HTTP and websockets.

    Flags win over QWEN3_TTS_… variables; the key comes from QWEN3_TTS_API_KEY alone.
    """
    with _one_line_errors():
        settings = _settings(**locals())
        _run_server(settings)


@app.command("make-checkpoint")
def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="A directory that does not exist yet.")],
    preset: Annotated[str, typer.Option(help="tiny, 0.6b or 1.7b.")] = "tiny",
    kind: Annotated[str, typer.Option(help="custom_voice, base or voice_design.")] = "custom_voice",
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write a random checkpoint in the released layout. Its voice is noise."""
    with _one_line_errors():
        _check_choice("--preset", preset, ("tiny", "0.6b", "1.7b"))
        _check_choice("--kind", kind, ("custom_voice", "base", "voice_design"))
        if out.exists():
            _fail(f"{out} exists already; name a directory that does not")
        _make_with_bar(out, preset, kind, seed)
        typer.echo(f"{out}: {preset} {kind}, random (its voice is noise)", err=True)


@app.command()
def info(
    model: Model = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    device: Device = None,
    engine: Engine = None,
    dtype: Dtype = None,
    offline: Offline = None,
    revision: Revision = None,
) -> None:
    """Load a model and tell what it is: kind, size, voices, languages, and what it runs on."""
    with _one_line_errors():
        where = {"device": device, "engine": engine, "dtype": dtype}
        settings = _settings(model=model, **where, offline=offline, revision=revision, lanes=1)
        with _engine(settings) as synthesizer:
            facts = synthesizer.info()
        typer.echo(json.dumps(facts, indent=2) if as_json else _table(facts))


def main() -> None:
    """The console script."""
    app()


def _settings(**flags: Any) -> Settings:
    """The environment's settings with the flags that were given over them."""
    return Settings(**{name: value for name, value in flags.items() if value is not None})


@contextmanager
def _engine(settings: Settings) -> Iterator[Synthesizer]:
    from service import engine

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("backend").setLevel(logging.ERROR)  # how the speech ended is in the line of figures
    synthesizer = engine.load(settings, progress=sys.stderr.isatty())
    try:
        yield synthesizer
    finally:
        synthesizer.close()


def _request(
    synthesizer: Synthesizer,
    text: str | None,
    voice: str | None,
    language: str,
    instruction: str | None,
    seed: int | None,
    sampling: dict[str, Any],
    text_mode: Any,
) -> SpeechRequest:
    from backend import Sampling, SpeechRequest

    if voice is None and synthesizer.voices:
        voice = synthesizer.voices[0]
    spoken = language_name(language)
    return SpeechRequest(text, voice, spoken, instruction, seed, Sampling(**sampling), text_mode)


def _write_speech(utterance: Utterance, output: str, form: wav_output.Form | None) -> None:
    """Writes chunks as they come and, last, one line of figures to stderr."""
    from tqdm import tqdm

    begun, first, samples = time.monotonic(), None, 0
    bar = tqdm(unit="s", desc="speech", disable=None, bar_format="{desc}: {n:.1f} s [{elapsed}]", file=sys.stderr)
    try:
        with wav_output.opened(output, form) as target, bar:
            for chunk in utterance:
                first = time.monotonic() - begun if first is None else first
                target.write(chunk.samples)
                samples += len(chunk.samples)
                bar.update(len(chunk.samples) / ENGINE_RATE)
    finally:
        utterance.cancel()
    if first is not None:
        typer.echo(_figures(utterance, first, time.monotonic() - begun, samples / ENGINE_RATE), err=True)


def _figures(utterance: Utterance, first: float, taken: float, seconds: float) -> str:
    line = f"first audio {first * 1000:.0f} ms, audio {seconds:.2f} s, RTF {taken / seconds:.3f}"
    line = f"{line}, seed {utterance.seed}"
    return f"{line}; stopped at the limit of frames" if utterance.finish_reason == "length" else line


def _read_input() -> str:
    if sys.stdin.isatty():
        typer.echo("reading text from standard input, until end of file", err=True)
    return sys.stdin.buffer.read().decode("utf-8").strip()


class _LiveInput(threading.Thread):
    """Pushes standard input while it comes. What cannot be spoken ends the speech."""

    def __init__(self, utterance: Utterance) -> None:
        super().__init__(name="qwen3-tts-input", daemon=True)
        self._error: ValueError | None = None
        self._has_text = False
        self._utterance = utterance
        self.start()

    def check(self) -> None:
        """Raises what ended the speech, or says that there was no text at all."""
        if self._error is not None:
            raise self._error
        if not self._has_text:
            _fail("standard input held no text to speak")

    def run(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")()
        standard_input = cast(io.BufferedReader, sys.stdin.buffer)
        try:
            while data := standard_input.read1(4096):
                self._has_text = self._has_text or bool(data.strip())
                self._utterance.push_text(decoder.decode(data))
            self._utterance.push_text(decoder.decode(b"", final=True))
            self._utterance.end_text()
        except ValueError as error:
            self._error = error
            self._utterance.cancel()


def _run_server(settings: Settings) -> None:
    """Loads, then listens, until SIGTERM or Ctrl-C."""
    import uvicorn

    from service import engine
    from service.app import create_app, server_config

    logging.basicConfig(
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # uvicorn handles the signal while it runs, then raises it again for the handler that was there before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    synthesizer = engine.load(settings, progress=sys.stderr.isatty())
    try:
        uvicorn.Server(server_config(create_app(synthesizer, settings), settings)).run()
    except KeyboardInterrupt:
        pass  # uvicorn raises it again once it is down, and that is all that was asked
    finally:
        synthesizer.close()


def _make_with_bar(out: Path, preset: Any, kind: Any, seed: int) -> None:
    from tqdm import tqdm

    from backend.make_checkpoint import make_checkpoint as make

    with tqdm(unit="B", unit_scale=True, desc="weights", disable=None, file=sys.stderr) as bar:

        def report(written: int, total: int) -> None:
            bar.total = total
            bar.update(written - bar.n)

        make(out, preset=preset, kind=kind, seed=seed, report=report)


def _table(facts: dict[str, Any]) -> str:
    def plain(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)

    width = max(map(len, facts))
    return "\n".join(f"{name:<{width}}  {plain(value)}" for name, value in facts.items())


def _check_choice(flag: str, value: str | None, known: tuple[str, ...]) -> None:
    if value is not None and value not in known:
        _fail(f"{flag} must be one of: {', '.join(known)}")


def _fail(message: str, code: int = 2) -> NoReturn:
    typer.echo(f"qwen3-tts: {message}", err=True)
    raise typer.Exit(code)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Every foreseen error as one line. A reader that went away is not an error."""
    from backend.errors import CheckpointError, EngineError, RequestError

    try:
        yield
    except BrokenPipeError:
        wav_output.discard_stdout()
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        message = str(problem["msg"]).removeprefix("Value error, ")
        _fail(f"{name}: {message}" if name else message)
    except UnicodeDecodeError:
        _fail("standard input is not UTF-8 text")
    except RequestError as error:
        _fail(str(error))
    except (CheckpointError, EngineError, OSError) as error:
        _fail(str(error), 1)
