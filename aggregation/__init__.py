"""Secure sums: the only road by which anything computed from a silo's data reaches the server."""

from secure_fvi.aggregation.base import Block, BlockTable, SecureSum, Total
from secure_fvi.aggregation.masked import Masked
from secure_fvi.aggregation.plain import Plain

__all__ = ["Block", "BlockTable", "Masked", "Plain", "SecureSum", "Total"]
