"""Waits on the board behind a descriptor: `python board_wait.py FD`."""

import sys

from swapd.shared.board import Board, word
from swapd.shared.fds import OwnedFd


def main(fd: int) -> None:
    with OwnedFd(fd) as file:
        board = Board(file)
    board.set(1, word(1, 1))
    board.wait(0, word(7, 3))
    print("arrived")  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]))
