"""Reads the stream until the daemon stops: `python -m benchmarks.stream.reader ADDRESS`.

It prints a line at the first record, and at the first report of missed records.
"""

import sys

import msgspec
import zmq


class Record(msgspec.Struct):
    seq: int
    type: str
    kind: str = ""
    count: int = 0


class Read(msgspec.Struct, frozen=True):
    """Records received, records reported as missed, and records missed without a report."""

    records: int
    told_missed: int
    untold: int


def read(address: str) -> Read:
    decode = msgspec.json.Decoder(Record).decode
    with zmq.Context() as context, context.socket(zmq.SUB) as feed:
        feed.setsockopt(zmq.RCVHWM, 1000)
        feed.subscribe(b"")
        feed.connect(address)
        records = told = untold = last = noted = 0
        while True:
            record = decode(feed.recv())
            if not records:
                print("reads", flush=True)  # noqa: T201
                last = record.seq - 1
            if record.type == "dropped":
                if not told:
                    print("missed", flush=True)  # noqa: T201
                told += record.count
                noted += record.count
                continue
            untold += record.seq - last - 1 - noted
            records, last, noted = records + 1, record.seq, 0
            if record.kind == "stopping":
                return Read(records, told, untold)


if __name__ == "__main__":
    print(msgspec.json.encode(read(sys.argv[1])).decode())  # noqa: T201
