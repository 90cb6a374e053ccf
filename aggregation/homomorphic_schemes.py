"""BFV and CKKS by TenSEAL: parameters, keys, vectors over several ciphertexts, and strict reading of bytes.

    scheme   moduli of the ciphertext      slots   plaintext
    bfv      43+43+44+44+44 bits (SEAL's)  8192    integers modulo a prime of 58 bits: sums are exact
    ckks     60+60+60 bits                 4096    reals at scale 2^60: sums carry the ciphertexts' noise

Degree 8192 with at most 218 bits is 128-bit secure by SEAL's tables; a context below that does not load.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from secure_fvi import wire
from secure_fvi.aggregation.base import BlockTable, FloatArray
from secure_fvi.aggregation.messages import Codec, Done, _32, _64, _64s, _any_bytes, _either, _list, _uint
from secure_fvi.aggregation.prg import Mask, keystream
from secure_fvi.aggregation.ring import Ring, out_of_range
from secure_fvi.errors import AggregationError, InputError, ProtocolError

DEGREE = 8192
CKKS_SCALE = 2.0**60
_CKKS_BITS = (60, 60, 60)
#: What serialisation adds to the coefficients of a ciphertext, at most.
_SLACK = 4096

#: What goes into slots and comes out of them: int64 for BFV, float64 for CKKS.
SlotArray = npt.NDArray[Any]


@dataclass(frozen=True)
class Scheme:
    """The fixed parameters of one scheme: equal at all parties, checked when a key is taken in."""

    name: str
    slots: int
    primes: int  # of a fresh ciphertext; the key has one more, which encryption consumes

    @property
    def max_ciphertext_bytes(self) -> int:
        """The longest serialised ciphertext that is read: two polynomials, uncompressed."""
        return 2 * DEGREE * 8 * self.primes + _SLACK

    def ciphertexts(self, size: int) -> int:
        """How many ciphertexts `size` values span."""
        return -(-size // self.slots)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.int64 if self.name == "bfv" else np.float64)


BFV = Scheme("bfv", DEGREE, 4)
CKKS = Scheme("ckks", DEGREE // 2, 2)


def scheme_named(name: str) -> Scheme:
    """BFV or CKKS; raises InputError for another name."""
    schemes = {s.name: s for s in (BFV, CKKS)}
    if name not in schemes:
        raise InputError(f"scheme must be 'bfv' or 'ckks', not '{name}'")
    return schemes[name]


def _tenseal() -> Any:
    """TenSEAL, loaded when it is first needed: masked sums do without."""
    import tenseal
    import tenseal.sealapi  # registers the types in which parameters are read

    return tenseal


@lru_cache(maxsize=1)
def _plain_type() -> Any:
    """A TenSEAL plain tensor around a list, without the copies that TenSEAL's own makes of it."""

    class PlainSlots(_tenseal().PlainTensor):  # type: ignore[misc]
        def __init__(self, values: list[Any]) -> None:
            self._values = values

        @property
        def raw(self) -> list[Any]:
            return self._values

        @property
        def shape(self) -> list[int]:
            return [len(self._values)]

    return PlainSlots


class SecretContext:
    """A key pair. Only the key holder has one."""

    def __init__(self, scheme: Scheme, context: Any = None) -> None:
        """A fresh key pair, unless `context` (TenSEAL's, with its secret key) is given."""
        self.scheme = scheme
        if context is None:
            ts = _tenseal()
            if scheme is BFV:
                context = ts.context(ts.SCHEME_TYPE.BFV, DEGREE, BFV_PRIME, n_threads=1)
            else:
                context = ts.context(ts.SCHEME_TYPE.CKKS, DEGREE, coeff_mod_bit_sizes=list(_CKKS_BITS), n_threads=1)
                context.global_scale = CKKS_SCALE
        self._context = context
        self.public_bytes: bytes = context.serialize(
            save_public_key=True, save_secret_key=False, save_galois_keys=False, save_relin_keys=False
        )

    def __repr__(self) -> str:
        return f"SecretContext({self.scheme.name})"

    def to_bytes(self) -> bytes:
        """The key pair, secret key included: for the holder's own storage alone."""
        return bytes(self._context.serialize(True, True, False, False))

    @classmethod
    def from_bytes(cls, scheme: Scheme, data: bytes) -> SecretContext:
        """The key pair that `to_bytes` gave; raises InputError for anything else."""
        try:
            context = _tenseal().context_from(data, n_threads=1)
        except Exception:  # TenSEAL raises whatever its C++ side throws; nothing of the bytes is quoted
            raise InputError("the stored key pair of the key holder cannot be read") from None
        if not context.has_secret_key():
            raise InputError("the stored key pair of the key holder has no secret key")
        _check_parameters(scheme, context)
        return cls(scheme, context)

    def decrypt(self, vectors: Sequence[Any]) -> SlotArray:
        """What `vectors` hold, one after another: int64 (BFV, centred residues) or float64 (CKKS)."""
        parts = []
        for vector in vectors:
            vector.link_context(self._context)
            parts.append(np.array(vector.decrypt(), self.scheme.dtype))
        return np.concatenate(parts) if parts else np.empty(0, self.scheme.dtype)


class PublicContext:
    """The public key at silos and server: encrypts, reads, adds; cannot decrypt."""

    def __init__(self, scheme: Scheme, data: bytes) -> None:
        """`data` as `SecretContext.public_bytes`. Raises ProtocolError for anything else.

        The caller has compared its hash with the roster: these bytes go to a parser written in C++.
        """
        if len(data) > MAX_KEY_BYTES:
            raise ProtocolError("the key holder's public key is too long")
        context = _read_key(scheme, data)
        _check_parameters(scheme, context)
        self.scheme = scheme
        self._context = context

    def __repr__(self) -> str:
        return f"PublicContext({self.scheme.name})"

    def encrypt(self, slots: SlotArray) -> list[bytes]:
        """Serialised ciphertexts of `slots` (size,), ceil(size / scheme.slots) of them."""
        ts, step = _tenseal(), self.scheme.slots
        make, plain = ts.bfv_vector if self.scheme is BFV else ts.ckks_vector, _plain_type()
        parts = (slots[start : start + step] for start in range(0, slots.size, step))
        return [make(self._context, plain(part.tolist())).serialize() for part in parts]

    def read(self, parts: Sequence[bytes], size: int) -> list[Any]:
        """The vectors that `parts` hold, of `size` values in all; raises ProtocolError for anything else."""
        step = self.scheme.slots
        if len(parts) != self.scheme.ciphertexts(size):
            raise ProtocolError(f"{len(parts)} ciphertexts; {self.scheme.ciphertexts(size)} are needed")
        return [self._read(part, min(step, size - at * step)) for at, part in enumerate(parts)]

    def _read(self, data: bytes, count: int) -> Any:
        if not 0 < len(data) <= self.scheme.max_ciphertext_bytes:
            raise ProtocolError("a ciphertext of the wrong length")
        ts, bfv = _tenseal(), self.scheme is BFV
        try:
            vector = (ts.bfv_vector_from if bfv else ts.ckks_vector_from)(self._context, _one_vector(self.scheme, data))
            ciphertexts = vector.ciphertext()
            fits = vector.size() == count and len(ciphertexts) == 1
            for c in ciphertexts:
                fits &= c.size() == 2 and c.poly_modulus_degree() == DEGREE
                fits &= c.coeff_modulus_size() == self.scheme.primes and not c.is_transparent()
                fits &= c.is_ntt_form() is not bfv and (bfv or c.scale == CKKS_SCALE)
        except InputError:
            raise
        except Exception:  # TenSEAL raises ValueError, RuntimeError and others, whatever its C++ side throws
            raise ProtocolError("a ciphertext cannot be read") from None
        if not fits:
            raise ProtocolError("a ciphertext of other parameters or another number of values")
        return vector

    def add(self, total: list[Any], term: Sequence[Any]) -> None:
        """Add `term` to `total` in place; raises ProtocolError where SEAL will not."""
        try:
            for left, right in zip(total, term, strict=True):
                left.add_(right)
        except Exception:
            raise ProtocolError("ciphertexts cannot be added") from None


def _check_parameters(scheme: Scheme, context: Any) -> None:
    """Raise ProtocolError unless `context` has exactly this file's parameters."""
    try:
        parameters = context.seal_context().data.key_context_data().parms()
        bits = [m.value().bit_length() for m in parameters.coeff_modulus()]
        fits = parameters.poly_modulus_degree() == DEGREE and parameters.scheme().name.lower() == scheme.name
        if scheme is BFV:
            fits &= parameters.plain_modulus().value() == BFV_PRIME and bits == [43, 43, 44, 44, 44]
        else:
            fits &= bits == list(_CKKS_BITS) and context.global_scale == CKKS_SCALE
    except Exception:
        raise ProtocolError("the parameters of the key holder's key cannot be read") from None
    if not fits:
        raise ProtocolError(f"the key holder's key has other parameters than {scheme.name} has here")


# ---- What TenSEAL is given of others' bytes: one form, unpacked here within the bytes that it stands for ----
#
# TenSEAL's messages are protobuf (tenseal/proto); an object of SEAL in them is a frame of 16 bytes (mark, version, kind
# of compression, length) and what it holds, in zstd. In that are frames again, without compression where SEAL wrote it.
# TenSEAL unpacks all objects of a message before anything can be looked at, and a hundred bytes stand for one of half a
# megabyte. So each field is looked at first, and no compressed byte of another party reaches it.

#: SEAL's mark, and the length of a frame's head.
_MARK, _HEAD = bytes.fromhex("5ea110"), 16
#: What zstd may look back over, in bytes: more than SEAL's own frames need.
_WINDOW = 2**23
#: Of a ciphertext (and a public key, which is one over all primes): parameters, form, sizes, scale; then a frame of
#: numbers.
_BEFORE_NUMBERS = 73
#: Fields that TenSEAL writes, by their tags.
_SIZES, _OBJECT, _SCALE = 0x0A, 0x12, 0x19
_PARAMETERS, _PUBLIC, _SECRET = 0x0A, 0x12, 0x1A
_KEY, _FLAGS = 0x0A, 0x10


def _one_vector(scheme: Scheme, data: bytes) -> bytes:
    """The vector of one ciphertext in `data`, without compression. Raises ValueError or IndexError for any other."""
    fields = _fields(data)
    if [tag for tag, _ in fields] != [_SIZES, _OBJECT, *([_SCALE] if scheme is CKKS else [])]:
        raise ValueError("not one ciphertext")
    (_, sizes), (_, frame), *scale = fields
    if len(sizes) > 3:
        raise ValueError("more than one size")
    return _joined([(_SIZES, sizes), (_OBJECT, _numbers(frame, scheme.primes)), *scale])


def _read_key(scheme: Scheme, data: bytes) -> Any:
    """TenSEAL's context around the public key in `data`, parameters and key alone. Raises ProtocolError."""
    try:
        fields = _fields(data)
        tags = [tag for tag, _ in fields]
        inner = _fields(fields[1][1]) if tags[:2] == [_PARAMETERS, _PUBLIC] else []
        alone = len(tags) == 2 and [tag for tag, _ in inner] == [_KEY, _FLAGS, _SCALE]
        frame = fields[0][1]
        if tags[:1] != [_PARAMETERS]:
            raise ValueError("no parameters")
    except Exception:
        raise ProtocolError("the key holder's public key cannot be read") from None
    if not alone:
        raise ProtocolError("the key holder's key must be its public key and nothing more")
    moduli = scheme.primes + 2  # of ciphertexts, of keys alone, of plaintexts
    try:
        parameters = _unpacked(frame, 17 + moduli * 24)
        for at in range(_HEAD + 17, len(parameters), 24):
            _check_plain(parameters, at, 24)
        key = [(_KEY, _numbers(inner[0][1], scheme.primes + 1)), *inner[1:]]
    except InputError:
        raise
    except Exception:
        raise ProtocolError(
            f"the key holder's key is damaged, or has other parameters than {scheme.name} has here"
        ) from None
    try:
        context = _tenseal().context_from(_joined([(_PARAMETERS, parameters), (_PUBLIC, _joined(key))]), n_threads=1)
    except Exception:  # whatever TenSEAL's C++ side throws
        raise ProtocolError("the key holder's public key cannot be read") from None
    if context.has_secret_key() or not context.has_public_key():
        raise ProtocolError("the key holder's key must be its public key and nothing more")
    return context


def _numbers(frame: bytes, primes: int) -> bytes:
    """The frame of two polynomials modulo so many primes, without compression. Raises ValueError for any other."""
    count = 2 * DEGREE * primes
    plain = _unpacked(frame, _BEFORE_NUMBERS + _HEAD + 8 + 8 * count)
    at = _HEAD + _BEFORE_NUMBERS
    _check_plain(plain, at, len(plain) - at)
    if int.from_bytes(plain[at + _HEAD : at + _HEAD + 8], "little") != count:
        raise ValueError("another number of numbers")
    return plain


def _check_plain(data: bytes, at: int, length: int) -> None:
    head = data[at : at + _HEAD]
    if head[:3] != _MARK or any(head[5:8]) or int.from_bytes(head[8:], "little") != length:
        raise ValueError("not a frame without compression")


def _unpacked(frame: bytes, length: int) -> bytes:
    """A frame without compression, of `length` bytes beside its head. Raises ValueError for one of more or less."""
    if frame[:3] != _MARK or int.from_bytes(frame[8:_HEAD], "little") != len(frame):
        raise ValueError("not a frame")
    body = frame[_HEAD:]
    if frame[5] == 2:
        try:
            with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(body) as unpacked:
                body = unpacked.read(length + 1)
        except zstandard.ZstdError:
            raise ValueError("not what it stands for") from None
    elif frame[5]:
        raise ValueError("compressed in another way")
    if len(body) != length:
        raise ValueError("not what it stands for")
    return frame[:5] + bytes(3) + (_HEAD + length).to_bytes(8, "little") + body


def _fields(data: bytes) -> list[tuple[int, bytes]]:
    """Tags and values of protobuf, at most four of the types that TenSEAL writes, in their order. Raises ValueError or
    IndexError for anything else."""
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        tag, at = data[at], at + 1
        end = at + 8
        if tag & 7 != 1:
            number, end = _varint(data, at)
        if tag & 7 == 2:
            at, end = end, end + number
        if tag > 127 or tag & 7 > 2 or end > len(data) or len(found) == 4:
            raise ValueError("other fields than TenSEAL's")
        found.append((tag, data[at:end]))
        at = end
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return number, at
    raise ValueError("a number without end")


def _joined(fields: Sequence[tuple[int, bytes]]) -> bytes:
    return b"".join(bytes([tag]) + (_counted(len(v)) if tag & 7 == 2 else b"") + v for tag, v in fields)


def _counted(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


# ---- The messages that homomorphic sums add to those of masked sums: between server, key holder and silos ----

#: A public context has about 0.54 MB.
MAX_KEY_BYTES = 1 << 20


class HolderKeyRequest(NamedTuple):
    """Server to key holder: send your public key."""


class HolderKey(NamedTuple):
    """Key holder to server, and on to each silo: its public encryption key, signed with its identity."""

    public_key: bytes
    signature: bytes


class Ciphertexts(NamedTuple):
    """A vector over as many ciphertexts as it needs: the payload of a contribution."""

    parts: list[bytes]


class DecryptRequest(NamedTuple):
    """Server to key holder: decrypt the total of one index, given enough signatures on its survivors.

    blocks: `BlockTable.packed` of the table whose digest they signed, from which the number of values follows.
    """

    sum_index: int
    key_set: bytes
    batch: bytes
    cohort: bytes
    survivors: bytes
    table: bytes
    context: bytes
    question: bytes
    signers: bytes
    signatures: list[bytes]
    blocks: bytes
    parts: list[bytes]


class Decrypted(NamedTuple):
    """Key holder to server: the total's slots as little-endian int64, signed with its identity."""

    sum_index: int
    values: bytes
    signature: bytes


#: A block takes some 60 bytes.
MAX_TABLE_BYTES = 1 << 20
#: Each far below a megabyte; so many hold 33 million values.
_ciphertexts = _list(wire.binary(most=1 << 20), 4096)

_CODEC = Codec(
    {
        Done: (16, ()),
        HolderKeyRequest: (32, ()),
        HolderKey: (33, (wire.binary(most=MAX_KEY_BYTES), _64)),
        Ciphertexts: (34, (_ciphertexts,)),
        DecryptRequest: (
            35,
            (
                *(_uint, _32, _32, _any_bytes, _any_bytes, _32, _32, _either(0, 32)),
                *(_any_bytes, _64s, wire.binary(most=MAX_TABLE_BYTES), _ciphertexts),
            ),
        ),
        Decrypted: (36, (_uint, _any_bytes, _64)),
    }
)
pack, unpack_any, unpack, kind_of = _CODEC.pack, _CODEC.unpack_any, _CODEC.unpack, _CODEC.kind_of


# ---- Fixed point in Z_p, p prime: the ring of BFV plaintexts, with masks that are uniform in it ----
#
# The scale follows from bound, number of terms and p, as in Z_2^w (ring.py). A mask element must be uniform in
# [0, p), or a masked value would lean towards its input; hence rejection sampling from the keystream.

#: The largest prime below 2^58 that is 1 modulo 2 * 8192, so that BFV of that degree packs one value a slot.
BFV_PRIME = 288230376150876161
BFV_HALF = BFV_PRIME // 2

ModularArray = npt.NDArray[np.uint64]
CentredArray = npt.NDArray[np.int64]  # representatives in [-(p-1)/2, (p-1)/2]

#: Terms below 2^58 in size that a sum in int64 may have before a reduction is due.
_LAZY_TERMS = 31
#: Elements masked at a time: accumulator and keystream stay in the second-level cache together.
_CHUNK = 1 << 14
_ZEROS = bytes(8 * _CHUNK)


class ResidueStream:
    """Uniform elements of [0, modulus) from the AES-256-CTR keystream of a one-time key (32 bytes).

    Each 64-bit word gives its leading bits, as many as the modulus has; words at or past it are passed over.
    """

    def __init__(self, key: bytes, modulus: int) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._modulus = modulus
        self._shift = np.uint64(64 - modulus.bit_length())

    def __repr__(self) -> str:
        return "ResidueStream(...)"

    def take(self, size: int) -> ModularArray:
        """The next `size` elements."""
        parts: list[ModularArray] = []
        while size > 0:
            zeros = _ZEROS[: 8 * size]  # no more than a chunk at a time
            words = np.frombuffer(self._encryptor.update(zeros), "<u8") >> self._shift
            if int(words.max()) >= self._modulus:
                words = words[words < self._modulus]
            parts.append(words)
            size -= words.size
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def masked(values: CentredArray, masks: Sequence[Mask], modulus: int) -> CentredArray:
    """Centred residues of `values` (centred) plus each mask, modulo `modulus` (odd, below 2^58)."""
    streams = [(ResidueStream(m.key, modulus), np.subtract if m.negative else np.add) for m in masks]
    half = modulus // 2
    out = values.astype(np.int64)
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        terms = 1
        for stream, operation in streams:
            operation(part, stream.take(part.size).view(np.int64), out=part)
            terms += 1
            if terms == _LAZY_TERMS:
                np.remainder(part, modulus, out=part)
                terms = 1
        np.remainder(part, modulus, out=part)
        np.subtract(part, modulus, out=part, where=part > half)
    return out


class PrimeRing:
    """Encoder and decoder of one block table for sums of at most `terms` contributions modulo a prime."""

    def __init__(self, table: BlockTable, terms: int, modulus: int = BFV_PRIME) -> None:
        """Raises InputError when an integer block's bound cannot fit."""
        self.modulus = modulus
        self._ring = Ring(table, 64, terms, limit=modulus // 4)

    @property
    def resolution(self) -> FloatArray:
        """The step of each element, shape (size,); a sum of J terms is off by at most J/2 steps."""
        return self._ring.resolution

    def encode(self, values: FloatArray, masks: Sequence[Mask], own: Mask | None = None) -> CentredArray:
        """Masked ring elements of `values`, (size,). own: on what is not zero of blocks of "some". Raises
        AggregationError as `Ring.encode` does."""
        out = masked(self._ring.encode(values).view(np.int64), masks, self.modulus)
        if own is not None:
            at = self._ring.table.some & (values != 0)
            out[at] = masked(out[at], [own], self.modulus)
        return out

    def decode(self, total: CentredArray, masks: Sequence[Mask], survivors: int | None = None) -> FloatArray:
        """The sum that `total` (size,) stands for once `masks` are applied to it, float64; `survivors` as in `Ring`."""
        words: npt.NDArray[Any] = masked(total, masks, self.modulus).view(np.uint64)
        return self._ring.decode(words, survivors)


# ---- What the key holder does to a decrypted CKKS total before anyone sees it: flooding, then rounding ----
#
# A CKKS decryption is not the exact sum but the sum plus e, an affine function of the secret key whose
# coefficients are in the ciphertext. Whoever knows the ciphertext and the exact sum solves for the key (Li and
# Micciancio 2021). So Gaussian noise far above e is added, as Li, Micciancio, Schultz and Sorrell (2022) bound it:
#
#     sd = 8 sqrt(DECRYPTIONS) 2^(STATISTICAL_BITS / 2) E,        E >= |e|_2 over the slots of one ciphertext
#
# for STATISTICAL_BITS bits of statistical security over DECRYPTIONS ciphertexts, past which the holder refuses.
# Rounding to a multiple of the largest power of two below sd follows: it costs nothing beside the noise, keeps
# bits of no meaning out of the release, and makes the precision of the total plain.
#
# E: a fresh ciphertext loses its key's last prime, so that its error is that of rounding, (r0 + r1 s) with
# variance (1 + 2N/3)/12 a coefficient (ternary s). J of them have J times that, an embedding N times, of which the
# real part is half: |e|_2 is near N/2 sqrt(J (1 + 2N/3)/12) / scale. To twice that comes what decoding in float64
# may add, 2^-49 of the vector's length, which is at most J sqrt(N/2), since each silo's slots lie in [-1, 1].

STATISTICAL_BITS = 30
#: Ciphertexts decrypted under one key.
DECRYPTIONS = 1 << 14

#: Integer totals are rounded to whole numbers; this many sds must fit in a half (8e-11 to be off by one).
_SURE = 6.5


def error_bound(terms: int) -> float:
    """E for a sum of `terms` fresh ciphertexts, in the slots' unit."""
    encryption = DEGREE / 2 * math.sqrt(terms * (1 + 2 * DEGREE / 3) / 12) / CKKS_SCALE
    return 2 * encryption + 2**-49 * terms * math.sqrt(DEGREE / 2)


def flooding_sd(terms: int) -> float:
    """Standard deviation of the noise in each slot, as a share of the element's bound."""
    return 8 * math.sqrt(DECRYPTIONS) * 2 ** (STATISTICAL_BITS / 2) * error_bound(terms)


def step_exponent(terms: int) -> int:
    """A released slot is a multiple of 2 to this power."""
    return math.frexp(flooding_sd(terms))[1] - 1


def secure_normal(size: int) -> FloatArray:
    """Standard normal variates (size,) by Box and Muller, from a fresh AES-256-CTR keystream; |x| < 8.6."""
    words = np.frombuffer(keystream(os.urandom(32), 16 * size), "<u8").reshape(2, size)
    # In (0, 1], so that the logarithm is finite.
    uniforms = ((words >> np.uint64(11)) + np.uint64(1)) * 2.0**-53
    normal: FloatArray = np.sqrt(-2 * np.log(uniforms[0])) * np.cos(2 * np.pi * uniforms[1])
    return normal


def flood(slots: FloatArray, terms: int) -> npt.NDArray[np.int64]:
    """Decrypted `slots` (size,) of a sum of at most `terms`, flooded and rounded: multiples of the step."""
    noisy = slots + flooding_sd(terms) * secure_normal(slots.size)
    return np.rint(np.ldexp(noisy, -step_exponent(terms))).astype(np.int64)


class RealSlots:
    """Values as CKKS slots: each divided by its bound; totals come back flooded."""

    def __init__(self, table: BlockTable, terms: int) -> None:
        """Raises InputError for an integer block whose total would not be sure to be exact."""
        for block in table.blocks:
            if block.integer and _SURE * flooding_sd(terms) * block.bound > 0.5:
                raise InputError(
                    f"integer block '{block.name}': bound {block.bound:g} is too large for exact totals by CKKS, "
                    f"at most {0.5 / _SURE / flooding_sd(terms):.4g}; use scheme = 'bfv'"
                )
        self._bounds = table.bounds
        self._checks = Ring(table, 64, terms)
        self._step = 2.0 ** step_exponent(terms)
        # A total is off by the noise, which is below 8.6 sds, and by rounding.
        self._slack = 10 * flooding_sd(terms) + self._step
        self._table = table
        self._integer = np.repeat([b.integer for b in table.blocks], [b.size for b in table.blocks]).astype(bool)

    @property
    def resolution(self) -> FloatArray:
        """Of what a total is a multiple of, by element."""
        return self._step * self._bounds

    def encode(self, values: FloatArray, masks: Any = (), own: Any = None) -> FloatArray:
        """Slots of `values` (size,), in [-1, 1]. No mask is uniform on them: totals of a block of "some" count silos.
        Raises AggregationError as `Ring.encode` does."""
        self._checks.encode(values)
        return values / self._bounds

    def decode(self, total: npt.NDArray[np.int64], masks: Any = (), survivors: int | None = None) -> FloatArray:
        """The sum that the holder's multiples of the step stand for, float64; `survivors` as in `Ring`."""
        if survivors is not None:
            end = 0
            for block in self._table.blocks:
                part = total[end : end + block.size] * self._step
                end += block.size
                if part.size and not np.abs(part).max() <= survivors + self._slack:
                    raise AggregationError(out_of_range(block, survivors))
        values: FloatArray = total * self._step * self._bounds
        return self._table.told(np.where(self._integer, np.rint(values), values))
