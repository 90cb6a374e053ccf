"""BFV and CKKS by TenSEAL: parameters, keys, vectors over several ciphertexts, and strict reading of bytes.

    scheme   moduli of the ciphertext      slots   plaintext
    bfv      43+43+44+44+44 bits (SEAL's)  8192    integers modulo a prime of 58 bits: sums are exact
    ckks     60+60+60 bits                 4096    reals at scale 2^60: sums carry the ciphertexts' noise

Degree 8192 with at most 218 bits is 128-bit secure by SEAL's tables; a context below that does not load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from secure_fvi.aggregation.homomorphic_messages import MAX_KEY_BYTES as MAX_KEY_BYTES
from secure_fvi.aggregation.modular import BFV_PRIME
from secure_fvi.errors import InputError, ProtocolError

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
        try:
            context = _tenseal().context_from(data, n_threads=1)
        except Exception:
            raise ProtocolError("the key holder's public key cannot be read") from None
        if context.has_secret_key() or not context.has_public_key():
            raise ProtocolError("the key holder's key must be its public key and nothing more")
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
            vector = (ts.bfv_vector_from if bfv else ts.ckks_vector_from)(self._context, data)
            ciphertexts = vector.ciphertext()
            fits = vector.size() == count and len(ciphertexts) == 1
            for c in ciphertexts:
                fits &= c.size() == 2 and c.poly_modulus_degree() == DEGREE
                fits &= c.coeff_modulus_size() == self.scheme.primes and not c.is_transparent()
                fits &= c.is_ntt_form() is not bfv and (bfv or c.scale == CKKS_SCALE)
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
