"""The fixtures of the service's tests."""

from tests.service.engine_fixtures import deaf, engine, server, stand_in, still_server, tiny

__all__ = ["deaf", "engine", "server", "stand_in", "still_server", "tiny"]
