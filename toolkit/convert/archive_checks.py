"""Checks of the bytes in archives of torch.save, each of whose records has a checksum (CRC-32) in the zip directory.

torch.load does not compare them. Here they are, a block at a time, so that no record is in memory for it.
"""

import struct
import zipfile
import zlib
from typing import IO

from toolkit.files import printable

_BLOCK_BYTES = 2**18
_RECORD_HEADER = struct.Struct("<4s22xHH")
"""What stands before a record: a signature, and at its end the lengths of the name and of the padding that follow."""
_SIGNATURE = b"PK\x03\x04"


class DamagedArchiveError(ValueError):
    """An archive whose bytes are not those that were saved."""


def check_records(file: IO[bytes]) -> None:
    """Read all records of an archive and compare their checksums. Raises DamagedArchiveError and OSError.

    A checksum of 0 is of a file that was saved without (`torch.serialization.set_crc32_options(False)`).
    """
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, struct.error) as error:
        raise DamagedArchiveError(f"its list of records cannot be read ({printable(str(error))})") from None
    block = memoryview(bytearray(_BLOCK_BYTES))
    for record in records:
        if record.CRC and _checksum(file, record, block) != record.CRC:
            name = printable(record.filename)
            raise DamagedArchiveError(f"the bytes of its record {name} are not those that were saved")


def _checksum(file: IO[bytes], record: zipfile.ZipInfo, block: memoryview) -> int | None:
    """The checksum of what is stored of a record; None where it is not there in full."""
    file.seek(record.header_offset)
    header = file.read(_RECORD_HEADER.size)
    if len(header) < _RECORD_HEADER.size:
        return None
    signature, name, padding = _RECORD_HEADER.unpack(header)
    if signature != _SIGNATURE:
        return None
    file.seek(record.header_offset + _RECORD_HEADER.size + name + padding)
    checksum = 0
    remaining = record.compress_size
    while remaining:
        count = file.readinto(block[: min(remaining, _BLOCK_BYTES)])  # type: ignore[attr-defined]
        if not count:
            return None
        checksum = zlib.crc32(block[:count], checksum)
        remaining -= count
    return checksum
