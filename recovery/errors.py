"""What can go wrong while deciding.

PlanariaError
└── RecoveryError
    ├── LayoutError          yours: the nodes cannot carry the redundancy asked for
    ├── ManifestError        bytes that are not a valid record
    │   └── FormatVersionError   a valid record of a format that this version does not read
    └── Unrecoverable        too much is lost: no generation can be rebuilt for every owner
"""

from __future__ import annotations

from erasure.errors import PlanariaError


class RecoveryError(PlanariaError):
    """Base of the errors of decisions."""


class LayoutError(RecoveryError, ValueError):
    """The nodes of this job cannot carry the redundancy that was asked for."""


class ManifestError(RecoveryError):
    """Bytes from an arena or a peer are not a valid record; they count as lost."""


class FormatVersionError(ManifestError):
    """A record whose checksum is right, written in a format version that is not ours."""


class Unrecoverable(RecoveryError):
    """No generation can be rebuilt for every owner."""
