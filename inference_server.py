"""The server's door: `python inference_server.py [flags]`, or `uvicorn --factory inference_server:app`.

The same as `qwen3-tts serve`. Everything that it does is in `service/`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI


def app() -> FastAPI:
    """The app over an engine that is loaded first, as `QWEN3_TTS_…` say. Address and port are uvicorn's."""
    from service.app import create_app
    from service.engine import load
    from service.settings import Settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = Settings()
    return create_app(load(settings), settings, close_engine=True)


if __name__ == "__main__":
    import typer

    from service.cli import serve

    typer.run(serve)
