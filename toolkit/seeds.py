"""Seeds derived from what they are used for, instead of from a counter."""

import hashlib
import json


def derive_seed(*parts: object) -> int:
    """Derive a 63-bit seed from any values, the same on every machine and in every process."""
    text = json.dumps([str(part) for part in parts]).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
