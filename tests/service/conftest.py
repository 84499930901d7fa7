"""The fixtures of the service's tests."""

from tests.service.engine_fixtures import engine, server, stand_in, still_server, tiny

__all__ = ["engine", "server", "stand_in", "still_server", "tiny"]
