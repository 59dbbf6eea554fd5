"""The scalars of a TensorBoard event file, read without the tensorboard package.

A file holds TFRecords: length, masked CRC-32C of the length, data, masked CRC-32C of the data. Each is a protobuf Event
with step = 2 and summary = 5; a summary repeats value = 1; a value has tag = 1 and either simple_value = 2 or, since
TensorFlow 2, tensor = 8 with dtype = 1 (1 is float, 2 double) and tensor_content = 4, float_val = 5 or double_val = 6.
"""

# Not tensorboard's own reader: it reads a damaged file as a shorter run without an error, takes twice the time, and
# would have everyone who compares runs install 19 MB.

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any


def scalars(data: bytes) -> Iterator[tuple[int, str, float]]:
    """Yield (step, tag, value) in the order of writing. A last record that is still being written is skipped.

    Raises ValueError for data that are not an event file.
    """
    try:
        for record in _records(data):
            event = dict(_fields(record))
            for field, value in _fields(event.get(5, b"")):
                entry = dict(_fields(value)) if field == 1 else {}
                tensor = dict(_fields(entry.get(8, b"")))
                kind = "<f" if 2 in entry else {1: "<f", 2: "<d"}.get(tensor.get(1, 0), "")
                number = entry.get(2) or tensor.get(4) or tensor.get(5) or tensor.get(6) or b""
                if kind and len(number) == struct.calcsize(kind):  # else a histogram, an image or a text
                    yield event.get(2, 0), entry[1].decode(), struct.unpack(kind, number)[0]
    except (IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError("a record is not an event of TensorBoard") from error


def _records(data: bytes) -> Iterator[bytes]:
    start = 0
    while start + 12 <= len(data):
        length, check = struct.unpack_from("<QI", data, start)
        if check != _masked_crc(data[start : start + 8]):
            raise ValueError(f"no event of TensorBoard at byte {start}")
        if start + length + 16 <= len(data):
            yield data[start + 12 : start + 12 + length]
        start += length + 16


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message: an int, or bytes."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        size, place = (8 if key & 7 == 1 else 4, place) if key & 7 in (1, 5) else _varint(message, place)
        if key & 7 == 0:
            yield key >> 3, size
        elif key & 7 in (1, 2, 5) and place + size <= len(message):
            yield key >> 3, message[place : (place := place + size)]
        else:
            raise IndexError


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while message[place] >= 128:
        value |= (message[place] & 127) << shift
        place += 1
        shift += 7
    return value | message[place] << shift, place + 1


@lru_cache
def _masked_crc(data: bytes) -> int:
    """Return the CRC-32C (reflected), rotated and offset as TFRecords have it. Few records differ in length."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
