"""How a rank reads what its worker asks, when the worker is killed."""

import socket

from pdserve.engine.rank_protocol import receive_request


def test_worker_that_is_killed_with_a_reply_unread_has_ended_the_connection() -> None:
    worker, rank = socket.socketpair()
    with rank:
        rank.sendall(b"a reply that nobody reads")
        worker.close()
        assert receive_request(rank) is None


def test_worker_that_closes_has_ended_the_connection() -> None:
    worker, rank = socket.socketpair()
    with rank:
        worker.close()
        assert receive_request(rank) is None
