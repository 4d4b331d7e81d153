"""Ports: chosen ones are errors when busy, default ones move."""

from __future__ import annotations

import os
import socket

import pytest

from ratchet.errors import PortInUse
from ratchet.supervisor import ports


def test_a_default_port_that_is_busy_moves_to_the_next_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        assert ports.choose_port("vllm", "vllm.port", "127.0.0.1", busy, fixed=False, taken=set()) > busy


def test_a_chosen_port_that_is_busy_names_pid_and_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"vllm: port {busy} is used by pid {os.getpid()} .* set vllm.port"):
            ports.choose_port("vllm", "vllm.port", "127.0.0.1", busy, fixed=True, taken=set())


def test_two_services_never_get_the_same_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1] + 1
    assert ports.choose_port("vllm", "vllm.port", "127.0.0.1", free, fixed=False, taken={free}) != free
    with pytest.raises(PortInUse, match="another service"):
        ports.choose_port("vllm", "vllm.port", "127.0.0.1", free, fixed=True, taken={free})


def test_a_port_on_which_a_vllm_that_starts_will_listen_is_not_free_and_one_in_time_wait_is() -> None:
    with socket.socket() as starting:
        starting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM does
        starting.bind(("127.0.0.1", 0))
        port = starting.getsockname()[1]
        assert not ports.is_free("127.0.0.1", port)
    assert ports.is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = server.accept()
        served.close()  # the side that closes first keeps TIME_WAIT
        client.close()
    assert ports._has_connections(port)
    assert ports.is_free("127.0.0.1", port)


def test_port_0_takes_a_free_one() -> None:
    port = ports.choose_port("vllm", "vllm.port", "127.0.0.1", 0, fixed=True, taken=set())
    assert port > 0
    assert ports.is_free("127.0.0.1", port)
