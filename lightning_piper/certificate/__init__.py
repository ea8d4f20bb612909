"""Certificates: everything that the static checks establish about a compiled program, as data.

`lightning_piper_cli.certificate` verifies a certificate. It shares no code with this package.
"""

from lightning_piper.certificate.document import certificate_of

__all__ = ["certificate_of"]
