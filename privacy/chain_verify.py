"""Checking a chain from the outside: every row, every signature, every receipt. Needs no private key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from secure_fvi.errors import InputError, ProtocolError
from secure_fvi.privacy.chain import NOTHING, ChainReader, Row
from secure_fvi.privacy.chain_file import ChainFile
from secure_fvi.privacy.witness import Countersignature, check_receipt, proves

C = TypeVar("C", bound=ChainReader)


def verify_chain(
    file: ChainFile,
    chain: C,
    public_key: bytes | None,
    shown: Iterable[Countersignature],
    after_row: Callable[[C, Row], None] = lambda chain, row: None,
) -> C:
    """Follow all rows of the empty `chain` in `file`, then compare with the receipts in it and with those `shown`.

    Receipts of the older form in it prove nothing. public_key: pins its key. after_row: called with the chain and each
    row that it took in. Raises ProtocolError that names the first bad row.
    """
    heads = [NOTHING]
    for row in file.rows(chain.silo):
        chain.follow(row, public_key, each_signature=True)
        heads.append(row.hash)
        after_row(chain, row)
    chain.check_head()
    kind = chain.kind
    if not chain.length:
        raise InputError(f"'{file.path}' holds no {kind.name} of silo '{chain.silo}'")
    for receipt in [*(check_receipt(data, None, kind) for data in chain.receipts if proves(data)), *shown]:
        if receipt.public_key != chain.public_key:
            raise ProtocolError(
                f"{kind.name} of silo '{chain.silo}': {shown_by(receipt)} is about a {kind.name} of another key"
            )
        if receipt.length > chain.length:
            raise ProtocolError(
                f"{chain.where(chain.length + 1)}: missing; {shown_by(receipt)} shows {receipt.length} "
                f"rows, {chain.length} are here: rows were cut off, or an old copy was put back"
            )
        if heads[receipt.length] != receipt.head:
            raise ProtocolError(
                f"{chain.where(receipt.length)}: not the row that {shown_by(receipt)} shows; the {kind.name} was "
                "written anew"
            )
    return chain


def shown_by(receipt: Countersignature) -> str:
    """Whose word it is, for messages."""
    return f"the receipt of witness '{receipt.witness}'"
