"""The bytes that one token stands for, whatever kind its vocabulary is."""

import re

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"
"""How vocabularies with byte fallback write a space."""


def bytes_of_token(piece: str, text: str) -> bytes:
    """`piece` is the token as its vocabulary has it, `text` what it decodes to by itself.

    In a byte-level vocabulary each character stands for a byte; in one with byte fallback some tokens are a byte, and
    decoding drops the space that a token begins with. Where bytes are a part of a character only `piece` tells them.
    """
    try:
        spelled = bytes(_BYTE_OF_SYMBOL[symbol] for symbol in piece)
    except KeyError:
        spelled = None
    if spelled is not None and spelled.decode(errors="replace") == text:
        return spelled
    fallback = _BYTE_FALLBACK.fullmatch(piece)
    if fallback is not None:
        return bytes([int(fallback[1], 16)])
    if piece.startswith(_SPACE) and not text.startswith(" "):
        text = f" {text}"
    return text.encode()


def _bytes_of_symbols() -> dict[str, int]:
    """What stands for byte b in a byte-level vocabulary: its own Latin-1 character where that prints, else one from
    U+0100 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_SYMBOL = _bytes_of_symbols()
